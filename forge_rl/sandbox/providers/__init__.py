"""Sandboxes elsewhere: behind HTTP, or rented."""
