"""Master weights and loss scale of half precision."""
