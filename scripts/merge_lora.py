"""Merge adapters into a model: python scripts/merge_lora.py --lora_path DIR --output_path OUT ..."""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["merge-lora", *sys.argv[1:]]))
