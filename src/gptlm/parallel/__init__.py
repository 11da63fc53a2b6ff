"""Leaves: how many processes share the work, and how. It never imports the network."""
