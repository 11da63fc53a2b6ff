"""One module per command: its arguments and aliases, and the steps from a command line to a checked run."""
