"""The libraries that compute: torchtitan for training, vLLM for decoding."""
