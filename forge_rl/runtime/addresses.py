"""Addresses over which the hosts of a run reach one another."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from forge_rl.errors import ConfigError

LOOPBACK = "127.0.0.1"
_INNER = re.compile(r"docker|br-|virbr|veth|cni|flannel|cali|lxc")
"""Interfaces that lead to containers of this machine, not to other machines."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """An address of one of this host's interfaces."""

    interface: str
    ip: str
    prefix: int
    """Bits of the address that its network shares."""

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        return ipaddress.ip_network(f"{self.ip}/{self.prefix}", strict=False)

    @property
    def public(self) -> bool:
        """Whether the whole internet can have a route to it."""
        return ipaddress.ip_address(self.ip).is_global


@dataclass(frozen=True, kw_only=True)
class Network:
    """How a host can be reached."""

    space: str
    """Identifies the machine's boot and network namespace, within which loopback suffices."""
    addresses: tuple[Address, ...]

    @staticmethod
    def of_this_host(interfaces: str = "") -> Network:
        """Return this host's addresses, on the named interfaces (comma-separated) if any are given."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = f"{boot} {os.readlink('/proc/self/ns/net')}"
        wanted = [name for name in interfaces.split(",") if name]
        found = tuple(each for each in _addresses() if not wanted or each.interface in wanted)
        return Network(space=space, addresses=found)


def meeting_address(networks: Sequence[Network], *, may_be_public: bool = False) -> str:
    """Choose the first host's address at which processes of all hosts meet: loopback if they share a machine.

    An address in a network that all hosts have is preferred, and a private one to a public one.

    Raises:
        ConfigError: the first host has only public addresses, and they must not be used, or none at all.
    """
    if len({network.space for network in networks}) == 1:
        return LOOPBACK
    first, *others = networks

    def is_shared(address: Address) -> bool:
        return all(any(each.network == address.network for each in other.addresses) for other in others)

    best = min(first.addresses, key=lambda each: (each.public, not is_shared(each), ":" in each.ip), default=None)
    if best is None:
        raise ConfigError(
            "the trainer's first host has no address that other hosts can reach",
            hint="name its interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME there",
        )
    if best.public and not may_be_public:
        raise ConfigError(
            f"the trainer's ranks could meet only at {best.ip}, which is public, and talk without authentication",
            hint="use hosts with a private network, or set --public-ports if nobody else can reach these",
        )
    return best.ip


def interface_towards(address: str) -> str:
    """Return the name of this host's interface over which an address is reached.

    Raises:
        ConfigError: no interface leads there.
    """
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    own = ""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
    found = next((each.interface for each in _addresses(inner=True) if each.ip == own), "")
    if not found:
        raise ConfigError(
            f"host {socket.gethostname()} has no way to {address}, where the trainer's ranks meet",
            hint="give the hosts a common network, and name its interface in GLOO_SOCKET_IFNAME on each",
        )
    return found


def _addresses(*, inner: bool = False) -> Iterator[Address]:
    """Yield the addresses of all interfaces that are up, without loopback and link-local ones.

    Args:
        inner: also yield addresses of bridges to containers.
    """
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    for name, found in sorted(psutil.net_if_addrs().items()):
        for each in found:
            if name not in up or each.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            ip = each.address.partition("%")[0]
            kind = ipaddress.ip_address(ip)
            if kind.is_loopback or kind.is_link_local or (_INNER.match(name) and not inner):
                continue
            mask = int(ipaddress.ip_address(each.netmask)) if each.netmask else (1 << kind.max_prefixlen) - 1
            yield Address(interface=name, ip=ip, prefix=mask.bit_count())
