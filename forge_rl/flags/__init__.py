"""Flags: the texts that users write in them, and the code that they name."""
