"""Addresses of --prometheus and --attach-on, and sockets that listen there."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from forge_rl.errors import ConfigError
from forge_rl.runtime.private_network import has_way_out, listen_outside

_LOOPBACK = "127.0.0.1"


def address_of(text: str, flag: str = "--prometheus") -> tuple[str, int]:
    """Split `PORT` or `HOST:PORT`; the host is loopback if there is none.

        address_of("9400")  # ("127.0.0.1", 9400)

    Raises:
        ConfigError: it is neither.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or _LOOPBACK
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{flag} is {text!r}", hint="set it to a port, such as 9400, or to HOST:PORT")
    return host, int(port)


def check_reachable(text: str, flag: str, *, may_be_public: bool) -> None:
    """Check that an address is one that other machines can use, and that it is not public.

    Raises:
        ConfigError: it is malformed, stands for all addresses, or is public although it may not be.
    """
    host, _ = address_of(text, flag)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name, whose address is checked once it is listened on
        return
    if address.is_unspecified:
        raise ConfigError(f"{flag} is {text!r}, every address", hint="name the one that the other machines use")
    if address.is_global and not may_be_public:
        raise ConfigError(
            f"{flag} is {text!r}, a public address, and data sent there is not encrypted",
            hint="name a private address, or set --public-ports if nobody else can listen there",
        )


def listen(text: str, flag: str = "--prometheus") -> socket.socket:
    """Listen at `PORT` or `HOST:PORT`, from inside a private network in the machine's network.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    host, port = address_of(text, flag)
    try:
        # In a private network, a socket of this process would be reachable by the run alone.
        if has_way_out():
            return listen_outside(host, port)
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        cause = str(error.strerror or error).partition(" (while")[0]
        raise ConfigError(
            f"{flag} cannot listen on {host} port {port}: {cause}",
            hint="set another port (0 picks a free one), or stop the program that uses it",
        ) from error


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
