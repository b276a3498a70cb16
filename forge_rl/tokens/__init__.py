"""Tokens: where text becomes tokens, and which of them text may write."""
