#!/usr/bin/env bash
# What the other scripts here run: bash examples/pretrain.sh NAME [FLAGS]. NAME is one of gptlm's configurations.
# Variables such as ONEFLOW_GPT_DATASET and ONEFLOW_GPT_NODE_IPS are flags (--dataset, --node-ips). FLAGS come last.
# Without a dataset, gpt_sample_dataset_text_document is taken from the current folder or from /data/gpt.
# NAME_with_container runs in image ONEFLOW_DEV_IMAGE, by default gptlm, with the folder ONEFLOW_GPT_DATA_DIR.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
if [ $# -eq 0 ]; then sed -n '2,5s/^# *//p' "$0" >&2; exit 2; fi
name=$1
shift

flags=()
for variable in "${!ONEFLOW_GPT_@}"; do
    flag=${variable#ONEFLOW_GPT_}
    case $flag in
        DATA_DIR | SRC_DIR | PYTHON_VERSION) continue ;; # of the container
        INIT_LOSS_SCALE) flag=INITIAL_LOSS_SCALE ;;
        LOAD_PATH | SAVE_PATH) flag=${flag%_PATH} ;;
    esac
    flag=${flag//_/-}
    flags+=("--${flag,,}" "${!variable}")
done
if [[ " ${flags[*]-} $*" != *" --dataset"* ]]; then
    for found in gpt_sample_dataset_text_document /data/gpt/gpt_sample_dataset_text_document; do
        if [ -e "$found.idx" ]; then flags+=(--dataset "$found"); break; fi
    done
fi
flags=(-c "$name" ${flags[@]+"${flags[@]}"} "$@")

if [[ $name != *_with_container ]]; then
    exec "${PYTHON:-python}" "$here/../../run_pretrain.py" "${flags[@]}"
fi
container=(--image "${ONEFLOW_DEV_IMAGE:-gptlm}" --cmd "gptlm pretrain$(printf ' %q' "${flags[@]}")")
if [ -n "${ONEFLOW_GPT_DATA_DIR:-}" ]; then container+=(--extra-mount "$ONEFLOW_GPT_DATA_DIR"); fi
if [ -n "${ONEFLOW_GPT_SRC_DIR:-}" ]; then container+=(--src "$ONEFLOW_GPT_SRC_DIR"); fi
if [ -n "${ONEFLOW_WHEEL:-}" ]; then container+=(--wheel "$ONEFLOW_WHEEL"); fi
if [ -n "${ONEFLOW_GPT_PYTHON_VERSION:-}" ]; then container+=(--py "$ONEFLOW_GPT_PYTHON_VERSION"); fi
exec python3 "$here/../tools/launch_container.py" "${container[@]}"
