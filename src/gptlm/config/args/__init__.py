"""Arguments of each command."""
