"""Pretrain a GPT on token files: python scripts/run_pretrain.py --input_dir DATA --output_dir OUT ..."""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["pretrain", *sys.argv[1:]]))
