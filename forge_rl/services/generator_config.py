"""Settings of the generator service."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from forge_rl.engines.devices import device_type
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.engines.speculation import check_speculation
from forge_rl.errors import ConfigError, check_flags
from forge_rl.flags.categories import Operational, Tunable
from forge_rl.models.adapter_limits import served_rank
from forge_rl.runtime.seats import check_bounds
from forge_rl.runtime.supervision import Restart
from forge_rl.system.redaction import without_credentials

_AHEAD_ON_CPU = 8
"""Requests of an engine on a CPU below which it works ahead."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig(DecodeSettings):
    """The generator: its engines, and how they sample."""

    replicas: Operational[int] = 1
    """Number of vLLM engines, each on tensor_parallel_size times data_parallel_size GPUs, or all on one
    CPU. May be 0 with --generator.urls."""
    hosts_per_replica: int = 1
    """Number of hosts of each engine: its tensor_parallel_size workers are split evenly over so many, for models that
    no host can hold. Slower than an engine within a host."""
    urls: Operational[tuple[str, ...]] = ()
    """Addresses of vLLM servers that others started by forge-rl serve-engine, such as http://10.0.0.7:8000, whose
    engines join the run in addition to its replicas. The environment variable VLLM_API_KEY must hold their key. Only
    https:// may lead to a public address."""
    min_replicas: int = 0
    """Minimum number of engines: a host that leaves takes its engines along, down to this many. By default as many as
    replicas, so that they move to other hosts."""
    max_replicas: int = 0
    """Maximum number of engines: a host that joins a live run adds as many as the other hosts have each, up to this
    many. By default as many as replicas."""
    guests: Operational[int] = 0
    """Number of further engines on the trainer's devices, with --placement separate and a schedule that decodes while
    training. They decode while the trainer waits for a batch, if it lately waited longer than the change takes."""
    spares: int = 0
    """Number of spare engines that stand by to take the place of engines that die, which otherwise takes a whole
    start. On CPU each needs an engine's memory, less its KV cache; on GPUs it holds no device memory: it has imported
    everything, and starts on the dead engine's GPUs."""
    max_num_seqs: int = field(default_factory=lambda: 256 if device_type() == "cuda" else 64)
    """Maximum concurrent requests per engine, on each of its data_parallel_size copies; more are queued. By default
    256 on CUDA, 64 on CPU."""
    gpu_memory_utilization: float = field(default_factory=lambda: 0.0 if device_type() == "cuda" else 0.4)
    """Share of a GPU's memory that an engine may use. 0, the default on CUDA, means the memory left by the run's
    trainer, or 0.9 of a GPU that the engine does not share."""
    max_tokens: Tunable[int] = 16
    """Maximum tokens of a completion. If left out on a GPU, half of max_model_len, unless the recipe has its own."""
    temperature: float = 1.0
    """Sampling temperature of training episodes; held-out tasks are decoded greedily."""
    restart: Restart = field(default_factory=Restart)
    """Policy for engines that die."""

    @property
    def engines(self) -> int:
        """Number of engines: those in other servers, which come first, then guests, then the others."""
        return len(self.urls) + self.guests + self.replicas

    @property
    def ahead_requests(self) -> int:
        """Requests per engine below which the pipelined schedule starts episodes of batches after the awaited one.

        Whatever is in flight at a publish is prefilled again. Decoding one more request costs a GPU next to nothing,
        but a CPU, beyond a few requests, as much as decoding it later.
        """
        return sys.maxsize if device_type() == "cuda" or self.urls else _AHEAD_ON_CPU

    @property
    def guest_indices(self) -> range:
        """Indices of the engines on the trainer's devices."""
        return range(len(self.urls), len(self.urls) + self.guests)

    def __post_init__(self) -> None:
        check_flags(
            self,
            "--generator.",
            minimum=dict.fromkeys(
                ("gpu_memory_utilization", "guests", "spares", "min_replicas", "max_replicas", "max_loras"), 0
            )
            | dict.fromkeys(
                (
                    "max_tokens",
                    "max_num_seqs",
                    "tensor_parallel_size",
                    "data_parallel_size",
                    "hosts_per_replica",
                    "max_lora_rank",
                ),
                1,
            )
            | {"replicas": 0 if self.urls else 1},
            above={
                "temperature": 0,
                "kv_cache_gib": 0,
                "stall_s": 0,
                "max_model_len": self.max_tokens,
            },
            maximum={"temperature": 2},  # vLLM's limit
            below={"gpu_memory_utilization": 1},
        )
        check_bounds(self, "--generator.")
        self._check_hosts()
        check_speculation(self.speculation, routed_experts=self.routed_experts, devices=self.devices)
        if self.kv_transfer_config:
            _check_json(self.kv_transfer_config)
        for url in self.urls:
            _check_url(url)
        if self.spares and not self.replicas:
            raise ConfigError("--generator.spares stand by for replicas, and there are none", hint="leave it out")
        if self.spares and not self.restart.max_restarts:
            raise ConfigError(
                "--generator.spares replace engines that die, and --generator.restart.max-restarts 0 replaces none",
                hint="leave out one of them",
            )
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ConfigError("--generator.urls names a server twice", hint="name each server once")
        if self.max_loras:
            served_rank(self.max_lora_rank)
        if self.adapters == "served" and (self.urls or self.hosts_per_replica > 1):
            flag = "--generator.urls" if self.urls else "--generator.hosts-per-replica"
            raise ConfigError(
                f"engines of {flag} serve no adapters, and --generator.adapters is served",
                hint=f"leave out one of {flag} and --generator.adapters",
            )
        if self.urls and self.max_loras:
            raise ConfigError(
                "engines of --generator.urls serve no adapters",
                hint="leave out --generator.max-loras, or use engines of the run",
            )
        if self.urls and self.routed_experts:
            raise ConfigError(
                "engines of --generator.urls do not return the experts that router replay needs",
                hint="leave out --trainer.router-replay, or use engines of the run",
            )

    def _check_hosts(self) -> None:
        hosts, size = self.hosts_per_replica, self.tensor_parallel_size
        if size % hosts:
            raise ConfigError(
                f"{size} workers of an engine cannot be split evenly over {hosts} hosts",
                hint="set --generator.tensor-parallel-size to a multiple of --generator.hosts-per-replica",
            )
        unsupported = {
            "--generator.data-parallel-size": self.data_parallel_size > 1,
            "--generator.guests": self.guests > 0,
            "--generator.max-loras": self.max_loras > 0,
            "--generator.spares": self.spares > 0,
            "--generator.kv-transfer-config": bool(self.kv_transfer_config),
        }
        for flag in (flag for flag, is_set in unsupported.items() if is_set and hosts > 1):
            raise ConfigError(
                f"{flag} does not work with engines of {hosts} hosts",
                hint=f"leave out {flag} or --generator.hosts-per-replica",
            )


def _check_json(text: str) -> None:
    """Raise ConfigError if a text is not a JSON object. vLLM checks its contents when an engine starts."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(
            f"--generator.kv-transfer-config is not a JSON object: {text[:80]}",
            hint='write for example {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, in single quotes',
        )


def _check_url(url: str) -> None:
    """Raise ConfigError, without any password, if an address is not one of a server."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # the port is no number
        is_valid = False
    if is_valid and "@" in parts.netloc:
        raise ConfigError(
            f"--generator.urls holds a user or password: {without_credentials(url)}",
            hint="leave it out, and put the server's key into the environment variable VLLM_API_KEY",
        )
    if not is_valid or parts.query or parts.fragment:
        raise ConfigError(
            f"--generator.urls: {without_credentials(url)!r} is not the address of a server",
            hint="write http://HOST:PORT or https://HOST:PORT",
        )
