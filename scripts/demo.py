"""The complete workflow on text that every Python contains: python scripts/demo.py"""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
