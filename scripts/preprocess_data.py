"""Turn text into token files: python scripts/preprocess_data.py --input_path TEXT --output_prefix OUT ..."""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
