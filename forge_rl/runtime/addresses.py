"""Addresses over which the hosts of a run reach one another, IPv4 or IPv6, and on which Monarch may listen."""

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
_DISCARD_PORT = 9
_URL = re.compile(r"(?:[\w-]+<\w+>@)?tcp://(?:\[([0-9a-fA-F:.]{2,45})\]|([0-9.]{7,15})):[0-9]{1,5}")


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
class HostNetwork:
    """How a host can be reached."""

    space: str
    """Identifies the machine's boot and network namespace, within which loopback suffices."""
    addresses: tuple[Address, ...]

    @staticmethod
    def of_this_host(interfaces: str = "") -> HostNetwork:
        """Return this host's addresses, on the named interfaces (comma-separated) if any are given."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = f"{boot} {os.readlink('/proc/self/ns/net')}"
        interface_names = [name for name in interfaces.split(",") if name]
        addresses = tuple(
            address for address in _addresses() if not interface_names or address.interface in interface_names
        )
        return HostNetwork(space=space, addresses=addresses)


def meeting_address(networks: Sequence[HostNetwork], *, may_be_public: bool = False) -> str:
    """Choose the first host's address at which processes of all hosts meet: loopback if they share a machine.

    An address in a network that all hosts have is preferred, and a private one to a public one.

    Raises:
        ConfigError: the first host has only public addresses, and they must not be used, or none at all.
    """
    if len({network.space for network in networks}) == 1:
        return LOOPBACK
    first_network, *other_networks = networks

    def is_shared(address: Address) -> bool:
        return all(
            any(candidate.network == address.network for candidate in network.addresses) for network in other_networks
        )

    # False sorts first: private addresses, then those in a network of all hosts, then IPv4.
    best = min(
        first_network.addresses,
        key=lambda address: (address.public, not is_shared(address), ":" in address.ip),
        default=None,
    )
    if best is None:
        raise ConfigError(
            "the first host has no address that other hosts can reach",
            hint="name its interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME there",
        )
    if best.public and not may_be_public:
        raise ConfigError(
            f"processes of several hosts could meet only at {best.ip}, which is public, without authentication",
            hint="use hosts with a private network, or set --public-ports if nobody else can reach these",
        )
    return best.ip


def interface_towards(address: str) -> str:
    """Return the name of the interface over which this host reaches an address.

    Raises:
        ConfigError: no interface leads there.
    """
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    local_ips = [str(ip) for ip in _towards([address])]
    interface = next((candidate.interface for candidate in _addresses(inner=True) if candidate.ip in local_ips), "")
    if not interface:
        raise ConfigError(
            f"host {socket.gethostname()} has no way to {address}, where processes of several hosts meet",
            hint="give the hosts a common network, and name its interface in GLOO_SOCKET_IFNAME on each",
        )
    return interface


def _addresses(*, inner: bool = False) -> Iterator[Address]:
    """Yield the addresses of all interfaces that are up, without loopback and link-local ones.

    Args:
        inner: also yield addresses of bridges to containers.
    """
    up_interfaces = {name for name, status in psutil.net_if_stats().items() if status.isup}
    for name, interface_addresses in sorted(psutil.net_if_addrs().items()):
        for addr in interface_addresses:
            if name not in up_interfaces or addr.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            # psutil appends the interface to link-local IPv6 addresses: "fe80::1%eth0".
            ip = addr.address.partition("%")[0]
            ip_address = ipaddress.ip_address(ip)
            if ip_address.is_loopback or ip_address.is_link_local or (_INNER.match(name) and not inner):
                continue
            # An address without a netmask is a network of its own.
            mask = int(ipaddress.ip_address(addr.netmask)) if addr.netmask else (1 << ip_address.max_prefixlen) - 1
            yield Address(interface=name, ip=ip, prefix=mask.bit_count())


def own_address(hosts: Sequence[str], interface: str = "", *, may_be_public: bool = False) -> str:
    """Return the IP address by which this machine reaches other hosts, preferably one of a private network.

        own_address(["node2", "node3"])  # "10.0.0.1"
        own_address(["node2"], "ib0")

    Args:
        hosts: names or addresses of the other hosts; empty for this machine alone. The result is a loopback address
            only if all of them are on this machine.
        interface: name of the network interface whose address to return instead.
        may_be_public: accept an address that the whole internet can have a route to.

    Raises:
        ConfigError: the interface is unknown, no route leads to the hosts, or the address is public and must not be.
    """
    addresses = _of_interface(interface) if interface else _towards(hosts)
    if not hosts and not interface:
        return LOOPBACK
    # Private before public, and loopback only if nothing else is private.
    addresses.sort(key=lambda address: (address.is_global, address.is_loopback))
    if not addresses:
        problem = f"interface {interface!r} has no address" if interface else f"no route leads to {', '.join(hosts)}"
        raise ConfigError(problem, hint="name an interface of the network between the hosts: interface=NAME")
    if addresses[0].is_global and not may_be_public:
        raise ConfigError(
            f"{addresses[0]} is a public address, and Monarch executes any code it receives there",
            hint="name an interface of a private network: interface=NAME; or set public=true if a firewall keeps "
            "everybody else out",
        )
    return str(addresses[0])


def url(ip: str, port: int) -> str:
    """Return Monarch's address of a port: `tcp://[::1]:26600`; port 0 lets it choose where it serves a controller."""
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


def is_trusted(address: str, *, may_be_public: bool = False) -> bool:
    """Return whether text from another machine is a Monarch address with a literal IP that is not public."""
    match = _URL.fullmatch(address)
    if match is None:
        return False
    try:
        return may_be_public or not ipaddress.ip_address(match[1] or match[2]).is_global
    except ValueError:
        return False


def _towards(hosts: Sequence[str]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Find the source addresses that the kernel would use; nothing is sent."""
    addresses = []
    for host in hosts:
        with contextlib.suppress(OSError, ValueError):  # the name is unknown, or its address out of reach
            for family, _, _, _, sockaddr in socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM):
                # Connecting a UDP socket makes the kernel choose a route and source address, without sending a packet.
                with contextlib.suppress(OSError, ValueError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(sockaddr)
                    addresses.append(ipaddress.ip_address(probe.getsockname()[0]))
    return [address for address in addresses if not address.is_link_local]


def _of_interface(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        raise ConfigError(
            f"{name!r} is not a network interface of this host", hint=f"choose one of {', '.join(interfaces)}"
        )
    texts = [addr.address for addr in interfaces[name] if addr.family in (socket.AF_INET, socket.AF_INET6)]
    addresses = [ipaddress.ip_address(text) for text in texts if "%" not in text]
    return [address for address in addresses if not address.is_link_local]
