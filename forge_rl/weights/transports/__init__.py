"""Transports carry a version's bytes from trainer to engines, one file each."""
