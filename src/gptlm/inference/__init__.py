"""Using a trained model: loading, generation."""
