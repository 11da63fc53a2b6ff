#!/usr/bin/env bash
# The same recipes for measuring speed, 300 steps: bash scripts/train_performance_8p.sh --data_path=PREFIX ...
set -euo pipefail
exec bash "$(dirname "$0")/train_full_8p.sh" --train_iters=300 --lr-decay-iters 300 "$@"
