"""Settings of the Generator service, for its handle and for its actors."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge_rl.engines.platform import Dtype
from forge_rl.errors import ConfigError
from forge_rl.runtime.supervision import Restart


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """The generator: its engines, and how they sample."""

    replicas: int = 1
    """Number of vLLM engines: one for each GPU that decodes, or several on one CPU."""
    dtype: Dtype = "auto"
    """Format of the engines' weights and activations. auto is bfloat16 on CUDA, float32 on CPU."""
    max_model_tokens: int = 1024
    """Most tokens of a prompt and its completion together."""
    max_new_tokens: int = 16
    """Most tokens of one completion."""
    temperature: float = 1.0
    """Sampling temperature of training episodes; held-out tasks are decoded greedily."""
    max_requests: int = 64
    """Most requests that one engine decodes at a time."""
    kv_cache_gib: float = 1.0
    """Memory for keys and values of an engine on CPU; on CUDA it takes what memory_share leaves."""
    memory_share: float = 0.4
    """Share of a GPU's memory that an engine may take; trainer and engine may live on the same GPU."""
    eager: bool = False
    """Do not compile and capture no CUDA graphs: starts sooner, decodes slower. Always so on CPU."""
    request_deadline_s: float = 3600.0
    """Longest time between two chunks of a completion. It includes the time for which the engines are paused."""
    restart: Restart = field(default_factory=Restart)
    """Policy for engines that die."""

    def __post_init__(self) -> None:
        for flag, value, good, hint in (
            ("replicas", self.replicas, self.replicas >= 1, "1 or more"),
            ("max-new-tokens", self.max_new_tokens, self.max_new_tokens >= 1, "1 or more"),
            ("temperature", self.temperature, 0 < self.temperature < 10, "a value above 0, usually 1"),
            ("max-requests", self.max_requests, self.max_requests >= 1, "1 or more"),
            ("kv-cache-gib", self.kv_cache_gib, self.kv_cache_gib > 0, "a value above 0"),
            ("memory-share", self.memory_share, 0 < self.memory_share < 1, "a value between 0 and 1"),
            ("request-deadline-s", self.request_deadline_s, self.request_deadline_s > 0, "a value above 0"),
            (
                "max-model-tokens",
                self.max_model_tokens,
                self.max_model_tokens > self.max_new_tokens,
                f"more than the {self.max_new_tokens} new tokens",
            ),
        ):
            if not good:
                raise ConfigError(f"--generator.{flag} is {value}", hint=f"set --generator.{flag} to {hint}")
