"""Serve a model over OpenAI's and Anthropic's APIs.

python -m apps.gateway --model smollm2-135m --port 8000
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from forge_rl.data.bundled import default_cache
from forge_rl.data.models import resolve_model
from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import CheckpointError
from forge_rl.folders import make_private
from forge_rl.gateway import Gateway, GatewayConfig, GeneratorBackend, check_address
from forge_rl.run.launch import launch
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.services.generator import Generator

KEY_VARIABLE = "FORGE_RL_API_KEY"
_START_DEADLINE_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Config(GatewayConfig):
    """Serve a model over OpenAI's and Anthropic's APIs."""

    model: str = "smollm2-135m"
    """Name of a bundled model, a local folder, or a Hugging Face id."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: str = field(default="", repr=False)
    """Key that requests must carry; by default the environment's FORGE_RL_API_KEY, which other users of the machine do
    not see."""
    generator: Generator.Config = field(default_factory=Generator.Config)
    """The engines. Requests choose the length and the temperature of completions."""
    seed: int = 0
    """Seed of the engines, for requests that bring none."""
    parse_control_tokens: bool = False
    """Encode text in messages and tools that reads like a control token, such as <|im_end|>, as that token. By default
    it is text: else whoever writes a tool's output could end its turn, and write the next one as the system. Prompts of
    /v1/completions are always read that way, as their writer also writes what a chat template would."""
    cache: Path = field(default_factory=default_cache)
    """Folder for models that are built here."""
    out: Path = Path("runs/gateway")
    """Folder for what the engines print, in logs/."""


@contextlib.asynccontextmanager
async def serving(config: Config) -> AsyncIterator[tuple[Gateway, Generator, Faults]]:
    """Starts engines and the gateway before them, and stops them after the body.

    Raises:
        ForgeError: they do not start; says why.
    """
    check_address(config)
    faults = Faults()
    faults.install()
    logs = config.out / "logs"
    make_private(logs, CheckpointError)
    cluster = Cluster(logs.resolve())
    generator: Generator | None = None
    try:
        folder, name = await asyncio.to_thread(_model, config)
        tokenizer = Tokenizer(folder, parse_control_tokens=config.parse_control_tokens)
        generator = await Generator.start(
            config.generator, cluster, faults, model=folder, seed=config.seed, deadline_s=_START_DEADLINE_S
        )
        await generator.serve_model()
        engines = generator
        gateway = Gateway(
            config,
            GeneratorBackend(generator, name),
            tokenizer,
            open_to_all=True,
            healthy=lambda: bool(engines.engines()),
            warn=lambda text: print(f"warning: {text}", file=sys.stderr, flush=True),
        )
        async with gateway:
            yield gateway, generator, faults
    finally:
        faults.closing = True
        if generator is not None:
            await generator.stop()
        await cluster.close()


async def main(config: Config) -> None:
    """Serves until a signal, or until no engine is left."""
    if not config.api_key:
        config = replace(config, api_key=os.environ.get(KEY_VARIABLE, ""))
    print(f"starting {config.model}", flush=True)
    async with serving(config) as (gateway, _, faults):
        await gateway.load_tool_parser()
        _greet(gateway, config)
        raise await faults.wait()


def _model(config: Config) -> tuple[Path, str]:
    """Finds the model's folder, and the name that requests call it by."""
    folder = resolve_model(config.model, config.cache).resolve()
    return folder, folder.name if Path(config.model).expanduser().is_dir() else config.model


def _greet(gateway: Gateway, config: Config) -> None:
    key = " -H 'authorization: Bearer KEY'" if config.api_key else ""
    body = f'{{"model": "{gateway.model}", "messages": [{{"role": "user", "content": "What is 2 + 3?"}}]}}'
    print(
        f"serving {gateway.model} at {gateway.base_url}\n\n"
        f"  curl {gateway.base_url}/chat/completions{key} -H 'content-type: application/json' \\\n    -d '{body}'\n\n"
        "Ctrl-C ends it",
        flush=True,
    )


if __name__ == "__main__":
    launch(Config, main)
