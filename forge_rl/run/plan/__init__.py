"""What is decided before anything starts: defaults, memory, where services go, and whether hosts are sound."""
