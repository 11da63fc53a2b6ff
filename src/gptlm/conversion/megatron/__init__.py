"""Checkpoints of Megatron-LM and Megatron-DeepSpeed."""
