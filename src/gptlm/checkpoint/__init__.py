"""gptlm's own checkpoints."""
