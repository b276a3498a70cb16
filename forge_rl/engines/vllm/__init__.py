"""Decoding on vLLM: the only place that imports it."""

from forge_rl.engines.vllm.engine import VLLMEngine
from forge_rl.engines.vllm.transfer import register

__all__ = ["VLLMEngine", "register"]
