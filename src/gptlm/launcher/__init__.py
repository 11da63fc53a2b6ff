"""Starting a script on all GPUs of one or several nodes."""
