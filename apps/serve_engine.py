"""Serve a vLLM engine that can join runs, by `vllm serve` with the flags that runs need.

VLLM_API_KEY=... python -m apps.serve_engine --model smollm2-135m --port 8000
VLLM_API_KEY=... python -m recipes.grpo --generator.urls http://127.0.0.1:8000

Whoever has the key can replace the engine's weights. The key is read from the environment only, as all users of a
machine see the flags of its processes.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from forge_rl.engines.factory import decode_environment, serve_command
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.errors import ConfigError, check_flags
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.run.launch import launch
from forge_rl.system.variables import api_key, handed_on

KEY_VARIABLE = "VLLM_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Serve a vLLM engine that can join runs."""

    model: str = "smollm2-135m"
    """Name of a bundled model, Hugging Face id, or folder of a model or a checkpoint: the same as the run's."""
    host: str = "127.0.0.1"
    """Address to listen on. The default serves only this machine; others are reached without encryption, so that only a
    private network, or a proxy that ends TLS, should stand before it."""
    port: int = 8000
    """Port to listen on."""
    engine: DecodeSettings = field(default_factory=DecodeSettings)
    """The engine; dtype, quantization and context must suit the run's --generator."""
    seed: int = 0
    """Seed of the engine, for requests without a seed."""
    cache: Path = field(default_factory=default_cache)
    """Folder for bundled models, which are built on first use."""
    print_command: bool = False
    """Print the command with its environment, without the key, and exit."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"port": 1, "seed": 0}, below={"port": 65536})
        if self.engine.routed_experts or self.engine.speculation != "off":
            raise ConfigError(
                "a served engine neither drafts tokens nor returns experts",
                hint="leave out --engine.speculation and --engine.routed-experts",
            )


async def main(config: Config) -> None:
    """Replace this process by vLLM's server."""
    if not config.print_command:
        api_key("a served engine", KEY_VARIABLE, option="")
    model = await asyncio.to_thread(resolve_model, config.model, config.cache)
    devices = config.engine.devices
    engine_environment = decode_environment(
        0, replicas=1, devices=devices, batch_invariant=config.engine.batch_invariant
    )
    arguments = serve_command(model, config.engine, host=config.host, port=config.port, seed=config.seed)
    command = [sys.executable, *arguments]
    if config.print_command:
        print(
            " ".join(
                [*(f"{name}={shlex.quote(value)}" for name, value in engine_environment.items()), shlex.join(command)]
            )
        )
        return
    key = {KEY_VARIABLE: os.environ[KEY_VARIABLE]}
    # The process itself becomes the server, so signals reach it and its exit status is the command's.
    os.execve(sys.executable, command, handed_on({**engine_environment, **key}))


if __name__ == "__main__":
    launch(Config, main)
