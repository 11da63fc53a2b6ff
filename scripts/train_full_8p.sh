#!/usr/bin/env bash
# The 8-GPU GPT-2 recipes: bash scripts/train_full_8p.sh --data_path=PREFIX [--model_size=345M] [--train_iters=500000]
# model_size is 345M, 1.3B, 2.7B, 3.7B or 345M_without_mp; every other argument is passed to run_pretrain.py unchanged.
set -euo pipefail

model_size=345M
train_iters=500000
data_path=
words=()
for word in "$@"; do
    case $word in
        --model_size=*) model_size=${word#*=} ;;
        --train_iters=*) train_iters=${word#*=} ;;
        --data_path=*) data_path=${word#*=} ;;
        *) words+=("$word") ;;
    esac
done

case $model_size in
    345M) recipe=gpt2-345m ;;
    1.3B | 2.7B | 3.7B) recipe=gpt-${model_size,,} ;;
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

exec "${PYTHON:-python}" "$(dirname "$0")/run_pretrain.py" -c "$recipe" --data_path "$data_path" \
    --train_iters "$train_iters" ${words[@]+"${words[@]}"}
