"""Training on torchtitan: the only place that imports it, and, with engines/platform.py, torch.distributed."""
