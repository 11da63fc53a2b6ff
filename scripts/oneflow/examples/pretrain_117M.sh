#!/usr/bin/env bash
# 124M parameters on one card.
exec bash "$(dirname "$0")/pretrain.sh" pretrain_117M "$@"
