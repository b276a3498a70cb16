"""Let this machine join a live run as a host, until the run ends or this is stopped.

forge-rl join /shared/runs/grpo-1a2b3c4d
sbatch --gpus=8 --wrap "forge-rl join /shared/runs/grpo-1a2b3c4d --name spot1"

The run gives it engines, up to --generator.max-replicas, or environments. SIGTERM or Ctrl-C lets it leave: its work
finishes or continues on other hosts, and nothing is lost. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from forge_rl.errors import ConfigError, ForgeError, InfrastructureError
from forge_rl.jobs.launched import LaunchedHost, launch_host
from forge_rl.run.launch import launch
from forge_rl.run.live.attach import AttachedRun, attach
from forge_rl.system.terminal import visible
from forge_rl.system.variables import handed_on

_START_S = 600.0
_LOOK_S = 5.0
"""Seconds between questions to the run."""
_MOST_MISSES = 3
"""Questions in a row that a busy run may leave unanswered."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Let this machine join a live run as a host."""

    run: tyro.conf.Positional[Path]
    """Run folder, on a file system that both machines see at this path."""
    name: str = ""
    """Name of the host, which no other host of the run has had; by default the machine's, with a number."""
    services: str = ""
    """What the host takes: generator, environment, or generator+environment. By default engines, or environments if the
    engines need GPUs and this machine has none."""
    interface: str = ""
    """Network interface whose address to listen on; by default the one that leads to the controller."""
    public: bool = False
    """Allow a public address. Monarch executes any code that it receives there."""


async def main(config: Config) -> None:
    """Join the run and serve it.

    Raises:
        ForgeError: the run refuses this host, or the host has failed.
    """
    run = await asyncio.to_thread(attach, config.run)
    controller = str((await asyncio.to_thread(run.ask, "hosts"))["controller"])
    default = f"{socket.gethostname()}-{os.getpid()}"
    # With the process number, as a host that has left cannot join again by its old name.
    name = config.name or re.sub(r"[^A-Za-z0-9.-]", "-", default)
    command = [sys.executable, "-m", "forge_rl.jobs.host", controller or "local"]
    command += ["--interface", config.interface] * bool(config.interface) + ["--public"] * config.public
    host = await launch_host(name, command, handed_on())
    following = asyncio.create_task(host.follow(_ignore, _ignore, may_be_public=config.public, is_here=not controller))
    try:
        address = await _address(host)
        services = [service for service in config.services.split("+") if service]
        joining = asyncio.to_thread(run.ask, "join", name=name, address=address, services=services)
        print(visible(str(await joining)), flush=True)
        await _serve(run, name, following, host)
    finally:
        await host.end()
        await following


async def _address(host: LaunchedHost) -> str:
    try:
        async with asyncio.timeout(_START_S):
            return await host.address
    except TimeoutError:
        raise InfrastructureError(
            f"the host does not listen after {_START_S:.0f} s", hint="see whether this machine is overloaded"
        ) from None


async def _serve(run: AttachedRun, name: str, following: asyncio.Task[None], host: LaunchedHost) -> None:
    """Wait until the run has ended or given up this host; if cancelled, leave first.

    Raises:
        InfrastructureError: the host has failed, or the run has lost it.
    """
    misses = 0
    try:
        while True:
            # Returns at once if the host's process ends, or after some seconds to ask the run about it.
            await asyncio.wait([following], timeout=_LOOK_S)
            if following.done():
                raise InfrastructureError(
                    f"the host has ended: {' | '.join(host.last_lines)}", hint="see its last lines"
                )
            try:
                state = (await asyncio.to_thread(run.ask, "hosts"))["hosts"].get(name, "unknown")
            except ForgeError as error:
                misses += isinstance(error, ConfigError)  # else it answers, but is busy
                if misses >= _MOST_MISSES:
                    print(visible(error.message), flush=True)
                    return
                continue
            misses = 0
            if state == "it has left":
                return
            if state not in ("serves", "leaves"):
                raise InfrastructureError(f"the run has lost this host: {state}", hint="join again by another name")
    except asyncio.CancelledError:
        print(f"{name} is leaving", flush=True)
        with contextlib.suppress(ForgeError):  # the run has ended, or lost it
            await asyncio.to_thread(run.leave, name)
        raise


def _ignore(*_: str) -> None:
    pass


if __name__ == "__main__":
    launch(Config, main)
