"""Small random models with the quirks of published checkpoints' folders: names, files, configs and tokenizers."""
