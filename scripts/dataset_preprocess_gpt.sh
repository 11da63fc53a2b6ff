#!/usr/bin/env bash
# English Wikipedia (or your own text) to ./data/my-gpt_text_sentence.bin and .idx, the data of the 8-GPU recipes.
#   bash scripts/dataset_preprocess_gpt.sh [--input=TEXT] [--data_dir=./data] [--workers=N] [--more="FLAGS"]
# TEXT: a file, a folder or a glob; unset: wikimedia/wikipedia is downloaded. vocabulary and merges in data_dir
# (or ./) are used, otherwise GPT-2's are downloaded.
set -euo pipefail

input="" data_dir=./data more=""
workers=$(nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1)
for word in "$@"; do
    case $word in
        --input=?*) input=${word#*=} ;;
        --data_dir=*) data_dir=${word#*=} ;;
        --workers=*) workers=${word#*=} ;;
        --more=*) more=${word#*=} ;;
        -h | --help) sed -n '2,5s/^# *//p' "$0"; exit 0 ;;
        *) echo "unknown argument: $word; known: --input=TEXT --data_dir=DIR --workers=N --more=\"FLAGS\"" >&2; exit 2 ;;
    esac
done
python=$(command -v python || command -v python3)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$data_dir"

for name in vocab.json merges.txt; do
    file=$data_dir/gpt2-$name
    if [ ! -s "$file" ] && [ -s "gpt2-$name" ]; then cp "gpt2-$name" "$file"; fi
    if [ ! -s "$file" ]; then
        url=${HF_ENDPOINT:-https://huggingface.co}/openai-community/gpt2/resolve/main/$name
        curl -fsSL --retry 3 --connect-timeout 10 -o "$file.incomplete" "$url" || {
            rm -f "$file.incomplete"
            echo "cannot download $url; save GPT-2's $name as $file" >&2; exit 1; }
        mv "$file.incomplete" "$file"
    fi
done

if [ -z "$input" ]; then
    input=$data_dir/wikipedia
    hf download wikimedia/wikipedia --repo-type dataset --include "20231101.en/*.parquet" --local-dir "$input" || {
        echo "cannot download wikimedia/wikipedia; give your text as --input=FILE_OR_FOLDER" >&2; exit 1; }
fi

# shellcheck disable=SC2086  # more is several arguments
exec "$python" "$here/preprocess_data.py" --input "$input" --output-prefix "$data_dir/my-gpt" \
    --vocab "$data_dir/gpt2-vocab.json" --merge-file "$data_dir/gpt2-merges.txt" \
    --tokenizer-type GPT2BPETokenizer --dataset-impl mmap --split-sentences --workers "$workers" $more
