"""Leaves: from text on disk to batches. Plain values in, arrays out; no ranks, no config objects."""
