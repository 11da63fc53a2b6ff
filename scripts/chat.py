"""Talk to a model in the terminal: python scripts/chat.py --model_name_or_path DIR"""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["chat", *sys.argv[1:]]))
