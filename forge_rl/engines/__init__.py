"""Engines: torchtitan trains, vLLM decodes, each behind an interface of `protocol.py`."""

ENGINE_DIED = 71
"""Exit status of a process that ended because the engine below it did."""
