"""Private addresses of machines, IPv4 or IPv6, on which Monarch may listen."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Sequence

import psutil  # type: ignore[import-untyped]

from forge_rl.errors import ConfigError

_DISCARD_PORT = 9
_URL = re.compile(r"(?:[\w-]+<\w+>@)?tcp://(?:\[([0-9a-fA-F:.]{2,45})\]|([0-9.]{7,15})):[0-9]{1,5}")


def own_address(towards: Sequence[str], interface: str = "", *, may_be_public: bool = False) -> str:
    """Return the IP address by which this machine reaches others; one that other networks cannot reach if there is one.

        own_address(["node2", "node3"])  # "10.0.0.1"
        own_address(["node2"], "ib0")

    Args:
        towards: host names or addresses of the others; none for this machine alone. Loopback only if all are.
        interface: network interface whose address to take instead.
        may_be_public: whether an address of the internet will do.

    Raises:
        ConfigError: there is no such interface or no route, or the address is public although it may not.
    """
    found = _of_interface(interface) if interface else _towards(towards)
    if not towards and not interface:
        return "127.0.0.1"
    found.sort(key=lambda address: (address.is_global, address.is_loopback))
    if not found:
        where = f"interface {interface!r} has no address" if interface else f"no route leads to {', '.join(towards)}"
        raise ConfigError(where, hint="name an interface of the network between the hosts: interface=NAME")
    if found[0].is_global and not may_be_public:
        raise ConfigError(
            f"{found[0]} is a public address, and Monarch executes any code it receives there",
            hint="name an interface of a private network: interface=NAME; or set public=true if a firewall keeps "
            "everybody else out",
        )
    return str(found[0])


def url(ip: str, port: int) -> str:
    """Return Monarch's address of a port: `tcp://[::1]:26600`; port 0 lets it choose where it serves a controller."""
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


def is_trusted(address: str, *, may_be_public: bool = False) -> bool:
    """Return whether a text of another machine is an address of Monarch's, with a literal IP that is not public."""
    match = _URL.fullmatch(address)
    if match is None:
        return False
    try:
        return may_be_public or not ipaddress.ip_address(match[1] or match[2]).is_global
    except ValueError:
        return False


def _towards(hosts: Sequence[str]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Find the source addresses that the kernel would use; nothing is sent."""
    found = []
    for host in hosts:
        with contextlib.suppress(OSError, ValueError):  # the name is unknown, or its address out of reach
            for family, _, _, _, place in socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError, ValueError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(place)
                    found.append(ipaddress.ip_address(probe.getsockname()[0]))
    return [address for address in found if not address.is_link_local]


def _of_interface(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    known = psutil.net_if_addrs()
    if name not in known:
        raise ConfigError(f"there is no network interface {name!r}", hint=f"choose one of {', '.join(known)}")
    texts = [each.address for each in known[name] if each.family in (socket.AF_INET, socket.AF_INET6)]
    found = [ipaddress.ip_address(text) for text in texts if "%" not in text]
    return [address for address in found if not address.is_link_local]
