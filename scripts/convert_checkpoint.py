"""Convert a checkpoint: python scripts/convert_checkpoint.py --from SOURCE --to hf|megatron|paddle --output DIR ..."""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
