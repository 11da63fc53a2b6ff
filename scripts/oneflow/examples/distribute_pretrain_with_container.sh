#!/usr/bin/env bash
# 1.65B on 4 x 8 cards: 2 replicas, 4 split each layer, 4 the stack.
exec bash "$(dirname "$0")/pretrain.sh" distribute_pretrain_with_container "$@"
