"""Checkpoints of other libraries: recognised, read safely, written."""
