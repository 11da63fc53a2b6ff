"""Train a tokenizer on text: python scripts/train_tokenizer.py --input_path TEXT --output_dir OUT"""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["tokenizer", *sys.argv[1:]]))
