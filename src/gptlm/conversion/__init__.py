"""Other libraries' checkpoints, read and written."""
