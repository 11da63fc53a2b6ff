"""Draw the report of runs: python scripts/report.py DIR [DIR ...] [--watch]"""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
