"""All GPU benchmarks in one command: `python -m benchmarks.gpu`."""
