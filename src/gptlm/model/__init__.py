"""Leaves: the network. It knows nothing of ranks or of the command line."""
