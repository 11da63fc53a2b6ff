"""OneFlow's training command: python3 -m oneflow_gpt.training --num-layers 24 ... is gptlm pretrain."""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["pretrain", *sys.argv[1:]]))
