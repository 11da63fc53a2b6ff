"""The training step around HuggingFace's Trainer: schedules, log lines, checkpoints."""
