#!/usr/bin/env bash
# The 8-GPU GPT-2 recipes: bash scripts/train_full_8p.sh --data_path=PREFIX [--model_size=345M] [--train_iters=500000]
# model_size: 345M, 1.3B, 2.7B, 3.7B or 345M_without_mp; every other argument is passed to run_pretrain.py unchanged.
# The run resumes from ckpts/ckpts_tmp/SIZE. With --performance it has 300 steps and always starts anew, in
# ckpts/ckpts_tmp/SIZE-performance.
set -euo pipefail

model_size=345M train_iters='' data_path='' performance='' save=''
words=()
while (($#)); do
    case $1 in
        # an empty value, as of a shell variable that is not set, is the default
        --model_size=*) model_size=${1#*=} && model_size=${model_size:-345M} ;;
        --train_iters=*) train_iters=${1#*=} ;;
        --data_path=*) data_path=${1#*=} ;;
        --model_size | --train_iters | --data_path)
            if (($# < 2)); then echo "$1 needs a value" >&2; exit 2; fi
            name=$1 value=$2
            shift 2
            set -- "$name=$value" "$@"
            continue
            ;;
        --performance) performance=1 ;;
        -h | --help) sed -n '2,5s/^# *//p' "$0"; exit 0 ;;
        --save | --save=* | --output[_-]dir | --output[_-]dir=*) save=typed words+=("$1") ;;
        *) words+=("$1") ;;
    esac
    shift
done

case $model_size in
    345M) recipe=gpt2-345m ;;
    1.3B | 2.7B | 3.7B) recipe=gpt-${model_size%B}b ;;
    345M_without_mp) recipe=gpt2-345m-without-mp ;;
    *)
        echo "--model_size=$model_size: expected 345M, 1.3B, 2.7B, 3.7B or 345M_without_mp" >&2
        exit 2
        ;;
esac
if [[ -z $data_path ]]; then
    echo "--data_path is missing: the prefix of the token files, such as data/my-gpt_text_sentence" >&2
    exit 2
fi

folder=ckpts/ckpts_tmp
default=$([[ -n $performance ]] && echo 300 || echo 500000)
given=(-c "$recipe" --data_path "$data_path" --train_iters "${train_iters:=$default}")
if [[ -n $performance ]]; then
    given+=(--lr-decay-iters "$train_iters")
    if [[ -z $save ]]; then given+=(--save "$folder/$model_size-performance" --overwrite_output_dir); fi
elif [[ -z $save ]] && { compgen -G "$folder/checkpoint-*" || compgen -G "$folder/latest*"; } > /dev/null; then
    echo "the checkpoints directly in $folder may be of any size: move them to $folder/345M, or whichever is theirs," \
        "then start again" >&2
    exit 2
fi
python=${PYTHON:-$(command -v python || command -v python3)}
exec "$python" "$(dirname "$0")/run_pretrain.py" "${given[@]}" ${words[@]+"${words[@]}"}
