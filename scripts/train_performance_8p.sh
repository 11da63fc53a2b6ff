#!/usr/bin/env bash
# The same recipes for measuring speed: bash scripts/train_performance_8p.sh --data_path=PREFIX [--model_size=345M]
# 300 steps from new weights, in ckpts/ckpts_tmp/SIZE-performance.
set -euo pipefail
exec bash "$(dirname "$0")/train_full_8p.sh" --performance "$@"
