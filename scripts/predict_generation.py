"""Continue prompts: python scripts/predict_generation.py --model_name_or_path DIR --prompt 'Once upon'"""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["predict", *sys.argv[1:]]))
