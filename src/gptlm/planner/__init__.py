"""Which parallel layouts fit a number of GPUs, and which is likely the fastest."""
