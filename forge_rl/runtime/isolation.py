"""Isolation of a run's sockets from other users: flags for the allowed exposure, and checks of the actual one."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil  # type: ignore[import-untyped]

from forge_rl.errors import ConfigError
from forge_rl.flags.categories import Category
from forge_rl.runtime.private_network import is_private
from forge_rl.system.variables import hand_on_too

_LOOPBACK = re.compile(r"127\.|::1$|::ffff:127\.")


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """Who else may reach the services."""

    CATEGORY: ClassVar[Category] = Category.OF_COMMAND

    private_network: bool = False
    """Run in a private network namespace, where other users of this machine cannot reach the services. Processes inside
    cannot reach other machines either, so models must be on disk; the gateway's port is opened outside."""
    strict_isolation: bool = False
    """Refuse to start if other users of this machine could reach the services, that is, without --private-network."""
    public_ports: bool = False
    """Let Monarch listen on addresses that other machines can reach. It executes any code it receives, so use this only
    on a network with nobody else on it."""
    pass_env: tuple[str, ...] = ()
    """Additional environment variables for the processes of a run: trainers, engines, agents, and processes started by
    environments. By default they get only the variables of Python, torch, vLLM, CUDA and caches. Rewards and
    environments themselves see all variables in os.environ."""


def check_isolation(isolation: Isolation) -> str:
    """Check the network of a run, and register the variables that its processes get; return a warning, or "".

    Raises:
        ConfigError: other users can reach the network although they must not; or a variable is not set.
    """
    hand_on_too(isolation.pass_env)
    if is_private():
        return ""
    if isolation.private_network:
        raise ConfigError(
            "this process is not in a private network",
            hint="start it with: python -m forge_rl.runtime.private_network ipython",
        )
    open_to = "every user of this machine can reach Monarch's sockets, and run code as you through them"
    if isolation.strict_isolation:
        raise ConfigError(f"--strict-isolation refuses to start: {open_to}", hint="add --private-network")
    if people := other_people():
        return (
            f"other users ({', '.join(people)}) run processes here; {open_to}: use --private-network (see SECURITY.md)"
        )
    return ""


def other_people(definitions: Path = Path("/etc/login.defs")) -> list[str]:
    """Return the names of other users with processes on this machine, without system users."""
    # User ids of people, unless /etc/login.defs says otherwise.
    bounds = {"UID_MIN": 1000, "UID_MAX": 60000}
    if definitions.is_file():
        matches = re.findall(r"^(UID_M\w\w)\s+(\d+)", definitions.read_text(errors="replace"), re.MULTILINE)
        bounds |= {name: int(value) for name, value in matches}
    process_infos = [process.info for process in psutil.process_iter(["uids", "username"])]
    names = {info["uids"].real: info["username"] for info in process_infos if info["uids"]}
    people = names.keys() & range(bounds["UID_MIN"], bounds["UID_MAX"] + 1)
    return sorted(names[uid] for uid in people - {os.getuid()})


def public_ports(process: psutil.Process, *, with_hosts: bool = False) -> list[str]:
    """Return the non-loopback addresses and ports on which a process listens for TCP connections.

    Args:
        with_hosts: leave out private addresses, over which the hosts of a run must reach it.
    """

    def is_public(text: str) -> bool:
        address = ipaddress.ip_address(text.partition("%")[0])
        # An unspecified address, 0.0.0.0 or ::, is every interface's, public ones included.
        return address.is_global or address.is_unspecified or not with_hosts

    addresses = [
        connection.laddr for connection in process.net_connections("tcp") if connection.status == psutil.CONN_LISTEN
    ]
    reachable = [address for address in addresses if not _LOOPBACK.match(address.ip) and is_public(address.ip)]
    return [f"{address.ip}:{address.port}" for address in reachable]
