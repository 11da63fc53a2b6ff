"""Fast forms of single operations, each with a plain fallback."""
