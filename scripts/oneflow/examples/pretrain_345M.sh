#!/usr/bin/env bash
# 355M parameters on one card.
exec bash "$(dirname "$0")/pretrain.sh" pretrain_345M "$@"
