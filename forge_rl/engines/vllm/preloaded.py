"""Imports all modules that vLLM's processes import at their start for any model, in a process that forks them."""

from __future__ import annotations

import importlib

from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

import forge_rl.engines.vllm.transfer  # noqa: F401

_OF_CPU = ("vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama", "vllm.v1.attention.backends.cpu_attn")

load_general_plugins()
for _name in _OF_CPU if current_platform.is_cpu() else ():
    importlib.import_module(_name)
