"""The door: every command line, JSON or YAML file becomes one checked run here."""
