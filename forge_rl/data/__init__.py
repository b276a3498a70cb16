"""Data: tokenizer, task sources and their mixture, and packing."""
