"""Engines: torchtitan trains, vLLM decodes, each behind an interface of `protocol.py`."""
