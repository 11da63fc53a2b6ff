"""Evaluate: python scripts/evaluate.py --task LAMBADA --eval_path lambada_test.jsonl --model_name_or_path DIR"""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
