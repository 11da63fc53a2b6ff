"""Whole runs. Each file reads top to bottom."""
