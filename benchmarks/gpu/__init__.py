"""All that there is to measure on a machine with GPUs, in one command: `python -m benchmarks.gpu`."""
