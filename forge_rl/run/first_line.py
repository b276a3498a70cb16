"""First line of a program's output, before what takes seconds to load; imports nothing that takes long."""

from __future__ import annotations

import functools
import sys

from forge_rl.runtime.private_network import has_way_out


@functools.cache
def announce() -> None:
    """Say at once, and once, that a program has begun, and how long it takes until its services run."""
    if has_way_out():  # it was said outside
        return
    print(
        "loading torch and Monarch takes 5 to 15 s; then the services start, which takes half a minute, or a few "
        "where the machine is busy or does it for the first time",
        file=sys.stderr,
        flush=True,
    )
