"""Serve a model to clients of OpenAI's API: python scripts/serve.py --model_name_or_path DIR"""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
