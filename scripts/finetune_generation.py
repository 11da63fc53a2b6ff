"""Fine-tune a GPT: python scripts/finetune_generation.py --model_name_or_path DIR --output_dir OUT ..."""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["sft", *sys.argv[1:]]))
