"""One transformer for training and generation, and its Hugging Face checkpoints."""
