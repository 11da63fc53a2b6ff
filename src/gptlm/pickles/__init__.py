"""Pickles of other libraries and of torch, read without running anything."""
