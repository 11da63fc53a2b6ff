"""The name of OneFlow's package, for commands that are typed in the folder above."""
