"""Start a script on several GPUs: python scripts/launch.py --gpus "0,1" scripts/run_pretrain.py --input_dir DATA ..."""

import sys

from gptlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
