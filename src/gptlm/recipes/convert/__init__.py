"""gptlm convert."""
