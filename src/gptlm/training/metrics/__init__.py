"""What is measured during training and evaluation."""
