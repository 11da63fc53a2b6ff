"""gptlm sft."""
