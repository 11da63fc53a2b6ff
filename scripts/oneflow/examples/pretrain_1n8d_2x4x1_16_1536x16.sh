#!/usr/bin/env bash
# 534M on 8 cards: 2 replicas, 4 split each layer.
exec bash "$(dirname "$0")/pretrain.sh" pretrain_1n8d_2x4x1_16_1536x16 "$@"
