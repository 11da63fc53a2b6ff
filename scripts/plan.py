"""Find a parallel layout for a model: python scripts/plan.py --num_gpus 8 --model_name_or_path ..."""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
