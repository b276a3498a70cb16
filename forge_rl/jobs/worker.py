"""Serves a pod to the controller of a run: `python -m forge_rl.jobs.worker IP PORT [--public]`."""

from __future__ import annotations

import argparse
import os
import sys

from forge_rl.runtime.addresses import is_trusted, url
from forge_rl.runtime.children import set_defaults
from forge_rl.runtime.monarch_log import secure_monarch_log
from forge_rl.runtime.processes import clean_up_after
from forge_rl.runtime.scratch import make_scratch
from forge_rl.runtime.signals import outlive_stop_signals


def main() -> None:
    """Serve on one of this machine's addresses until killed.

    A stop signal does not end it, since the controller, which hears of it from the scheduler, still needs the host to
    save.
    """
    parser = argparse.ArgumentParser(prog="python -m forge_rl.jobs.worker")
    parser.add_argument("ip")
    parser.add_argument("port", type=int)
    parser.add_argument("--public", action="store_true")
    flags = parser.parse_args()
    address = url(flags.ip, flags.port)
    if not is_trusted(address, may_be_public=flags.public):
        sys.exit(
            f"error: {flags.ip} is not a private address, and Monarch executes any code it receives there\n"
            "  hint: give pods private addresses; or set --job kubernetes:public=true if nobody else can reach them"
        )
    outlive_stop_signals()
    os.environ["TMPDIR"] = scratch = make_scratch()
    clean_up_after([scratch])
    # Before Monarch is imported, as it then opens its log.
    secure_monarch_log()
    set_defaults()
    from monarch.actor import run_worker_loop_forever

    run_worker_loop_forever(address=address, ca="trust_all_connections")


if __name__ == "__main__":
    main()
