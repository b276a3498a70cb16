"""The libraries that compute: torchtitan for training, vLLM for decoding."""

ENGINE_DIED = 71
"""Exit status of a process that ended because the engine below it did."""
