"""Inspect token files: python scripts/data_tools.py check PREFIX (also stats, show, order, index, merge, convert)"""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", *sys.argv[1:]]))
