#!/usr/bin/env bash
# 1.65B on 8 cards, all of which split each layer.
exec bash "$(dirname "$0")/pretrain.sh" pretrain_with_container "$@"
