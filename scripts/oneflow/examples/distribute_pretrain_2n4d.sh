#!/usr/bin/env bash
# 534M on 2 x 4 cards: 2 replicas, 4 split each layer.
exec bash "$(dirname "$0")/pretrain.sh" distribute_pretrain_2n4d "$@"
