"""Data: the tokenizer, the sources of tasks and their mixture, and packing."""
