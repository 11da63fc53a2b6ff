"""gptlm pretrain."""
