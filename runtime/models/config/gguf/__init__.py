"""GGUF checkpoints: one file, or a split one, from which config and tokenizer follow as well. Torch-free."""
