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
        --input=*) input=${word#*=} ;;
        --data_dir=*) data_dir=${word#*=} ;;
        --workers=*) workers=${word#*=} ;;
        --more=*) more=${word#*=} ;;
        -h | --help) sed -n '2,5s/^# *//p' "$0"; exit 0 ;;
        *) echo "unknown argument: $word; known: --input=TEXT --data_dir=DIR --workers=N --more=\"FLAGS\"" >&2; exit 2 ;;
    esac
done
python=${PYTHON:-$(command -v python || command -v python3)}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
hub=${HF_ENDPOINT:-https://huggingface.co}
gpt2=$hub/openai-community/gpt2/resolve/main
wikipedia=$hub/datasets/wikimedia/wikipedia
mkdir -p "$data_dir"

# Name everything that is missing, not only what was tried first, and where each file belongs.
cannot_download() {
    echo "cannot download $1; without network, get these elsewhere and start again:" >&2
    for name in vocab.json merges.txt; do
        if [ ! -s "$data_dir/gpt2-$name" ]; then echo "  $gpt2/$name as $data_dir/gpt2-$name" >&2; fi
    done
    if [ -z "$input" ]; then
        echo "  your own text, given as --input=FILE_OR_FOLDER, or the files 20231101.en/*.parquet of $wikipedia," \
            "given as --input=FOLDER" >&2
    fi
    exit 1
}

for name in vocab.json merges.txt; do
    file=$data_dir/gpt2-$name
    if [ ! -s "$file" ] && [ -s "gpt2-$name" ]; then cp "gpt2-$name" "$file"; fi
    if [ ! -s "$file" ]; then
        curl -fsSL --connect-timeout 10 -o "$file.incomplete" "$gpt2/$name" || {
            rm -f "$file.incomplete"
            cannot_download "$gpt2/$name"; }
        mv "$file.incomplete" "$file"
    fi
done

if [ -z "$input" ]; then
    input=$data_dir/wikipedia
    # curl tries once; the download itself retries for minutes
    curl -fsSL --connect-timeout 10 -o /dev/null "$wikipedia/resolve/main/README.md" || { input=; cannot_download "$wikipedia"; }
    "$python" - "$input" <<'END' || { input=; cannot_download "$wikipedia"; }
import sys
from huggingface_hub import snapshot_download
snapshot_download("wikimedia/wikipedia", repo_type="dataset", allow_patterns="20231101.en/*.parquet", local_dir=sys.argv[1])
END
fi

# shellcheck disable=SC2086  # more is several arguments
exec "$python" "$here/preprocess_data.py" --input "$input" --output-prefix "$data_dir/my-gpt" \
    --vocab "$data_dir/gpt2-vocab.json" --merge-file "$data_dir/gpt2-merges.txt" \
    --tokenizer-type GPT2BPETokenizer --dataset-impl mmap --split-sentences --workers "$workers" $more
