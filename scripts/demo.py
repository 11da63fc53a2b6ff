"""The whole way on this machine's own text: python scripts/demo.py"""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
