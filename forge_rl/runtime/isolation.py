"""Who else could reach a run's sockets: flags that say what is allowed, and checks of what is."""

from __future__ import annotations

import os
import pwd
import re
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from forge_rl.errors import ConfigError
from forge_rl.runtime.private_network import is_private
from forge_rl.variables import hand_on_too

_LOOPBACK = re.compile(r"127\.|::1$|::ffff:127\.")


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """Who else may reach the services."""

    private_network: bool = False
    """Run in a network of its own, where no other user of this machine reaches the services. Nothing in it reaches
    other machines either, so models must be on disk; the gateway's port is opened outside."""
    strict_isolation: bool = False
    """Refuse to start where other users of this machine could reach the services, which means without
    --private-network."""
    public_ports: bool = False
    """Let Monarch listen where other machines reach it. It runs what it is sent, from whoever sends it: only for a
    network that nobody else is in."""
    pass_env: tuple[str, ...] = ()
    """Names of more environment variables that the processes of a run get: trainers, engines, agents, and what worlds
    start. Without it they get those only which Python, torch, vLLM, CUDA and caches read. Rewards and environments
    themselves find all of them in os.environ."""


def check_isolation(isolation: Isolation) -> str:
    """Check the network that a run is in, and note what its processes get; returns a line to warn of, or "".

    Raises:
        ConfigError: it is open, and must not be; or a variable is not set.
    """
    hand_on_too(isolation.pass_env)
    if is_private():
        return ""
    if isolation.private_network:
        raise ConfigError(
            "this process is not in a network of its own",
            hint="begin it so: python -m forge_rl.runtime.private_network ipython",
        )
    open_to = "every user of this machine can reach Monarch's sockets, and run code through them as this one"
    if isolation.strict_isolation:
        raise ConfigError(f"with --strict-isolation nothing starts: {open_to}", hint="add --private-network")
    if people := other_people():
        return f"{', '.join(people)} has processes here, and {open_to}: use --private-network (see SECURITY.md)"
    return ""


def other_people(definitions: Path = Path("/etc/login.defs")) -> list[str]:
    """Return the names of people who have processes on this machine, without this user and the system's own users."""
    bounds = {"UID_MIN": 1000, "UID_MAX": 60000}
    if definitions.is_file():
        found = re.findall(r"^(UID_M\w\w)\s+(\d+)", definitions.read_text(errors="replace"), re.MULTILINE)
        bounds |= {name: int(value) for name, value in found}
    uids = {uid for process in psutil.process_iter() if (uid := _uid_of(process)) is not None} - {os.getuid()}
    return sorted(map(_name_of, (uid for uid in uids if bounds["UID_MIN"] <= uid <= bounds["UID_MAX"])))


def public_ports(process: psutil.Process) -> list[str]:
    """Return the addresses and ports, not of the loopback interface, at which a process listens for TCP."""
    found = [each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return [f"{address.ip}:{address.port}" for address in found if not _LOOPBACK.match(address.ip)]


def _uid_of(process: psutil.Process) -> int | None:
    try:
        uid: int = process.uids().real
    except psutil.NoSuchProcess:
        return None
    return uid


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
