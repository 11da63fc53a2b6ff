"""gptlm: train, fine-tune, evaluate and run GPT-style language models on the HuggingFace stack."""

__version__ = "0.1.0"
