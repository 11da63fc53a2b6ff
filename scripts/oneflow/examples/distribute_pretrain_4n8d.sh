#!/usr/bin/env bash
# 1.65B on 4 x 8 cards: 4 replicas, 8 split each layer.
exec bash "$(dirname "$0")/pretrain.sh" distribute_pretrain_4n8d "$@"
