"""First line of a program's output, printed before slow imports; imports nothing slow itself."""

from __future__ import annotations

import functools
import sys

from forge_rl.runtime.private_network import has_way_out


@functools.cache
def announce() -> None:
    """Print once, immediately, how long it takes until the program's services run."""
    shows_only = any(word.startswith(("-h", "--help", "--dump-config", "--dry-run")) for word in sys.argv[1:])
    if shows_only or has_way_out():  # the process outside has printed it
        return
    print(
        "loading torch and Monarch takes 5 to 15 s; then the services start, which takes half a minute, or a few "
        "minutes on a busy machine or the first time",
        file=sys.stderr,
        flush=True,
    )
