"""Serves this host to the controller of a run: `python -m forge_rl.runtime.jobs.worker ADDRESS PORT [--public]`."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Sequence

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.runtime.cluster import set_defaults
from forge_rl.runtime.signals import outlive_stop_signals


def bracketed(address: str) -> str:
    """Return an IP address as it stands before a port: IPv6 addresses get brackets."""
    return f"[{address}]" if ":" in address else address


def check_private(address: str, *, hint: str) -> None:
    """Check that an IP address cannot be reached from the internet.

    Raises:
        ConfigError: it can, or it is not an IP address; with the hint.
    """
    try:
        is_public = ipaddress.ip_address(address).is_global
    except ValueError:
        raise ConfigError(f"{address!r} is not an IP address", hint=hint) from None
    if is_public:
        raise ConfigError(
            f"the host's address {address} is public, and Monarch executes any code that reaches it", hint=hint
        )


def serve(address: str, port: int) -> None:
    """Serve this host on one of its addresses until the process is killed; stop signals do not end it.

    The controller, which is told by the scheduler, still needs the host to save.
    """
    outlive_stop_signals()
    set_defaults()
    from monarch.actor import run_worker_loop_forever

    run_worker_loop_forever(address=f"tcp://{bracketed(address)}:{port}", ca="trust_all_connections")


def main(words: Sequence[str]) -> int:
    """Serve until killed; returns 1 if the address must not be used."""
    address, port, *options = words
    try:
        if "--public" not in options:
            check_private(address, hint="give the pods private addresses, or set --job kubernetes:public=true")
    except ForgeError as error:
        print(error, file=sys.stderr)
        return 1
    serve(address, int(port))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
