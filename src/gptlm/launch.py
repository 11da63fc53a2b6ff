"""`python -m gptlm.launch [flags] SCRIPT ...`: PaddlePaddle's and OneFlow's launch commands, through torchrun."""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
