"""Runs a recipe from the command line: flags, signals, one clear message for an error, and the exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import tyro
from rich.console import Console
from rich.text import Text

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.runtime.isolation import Isolation
from forge_rl.runtime.private_network import enter, has_way_out, is_private
from forge_rl.variables import hide

_REPLACED = {"--trainer.recompute": "--trainer.activation-checkpointing full"}
"""Flags of before, and what to give now."""

C = TypeVar("C")


def launch(
    config_class: type[C],
    main: Callable[[C], Awaitable[None]],
    *,
    prog: str | None = None,
    args: Sequence[str] | None = None,
) -> None:
    """Parses flags and runs a recipe; never returns.

        if __name__ == "__main__":
            launch(Config, main)

    Exit status: 0 after a complete run, 1 after an error, 2 for wrong flags, 130 after Ctrl-C, 143 after SIGTERM.

    Args:
        config_class: a frozen dataclass; its fields become flags, and its docstrings their help. One named `isolation`
            says whether it runs in a network of its own; one named `plan`, whether its memory is shown instead.
        main: the recipe.
        prog: how the user called it, for `--help`; `python -m` and its module by default.
        args: flags to parse; those of the command line by default.
    """
    try:
        for given in sys.argv[1:] if args is None else args:
            if now := _REPLACED.get(given.partition("=")[0].replace("_", "-").replace(".no-", ".")):
                raise ConfigError(f"{given} is no flag any more", hint=f"give {now}, or nothing for none")
        config = tyro.cli(config_class, prog=prog or _command_of(main), args=args, description=config_class.__doc__)
        if vars(config).get("plan"):
            from forge_rl.run.plan import show_plan

            show_plan(config)
            status = 0
        else:
            isolation = vars(config).get("isolation", Isolation())
            if isolation.private_network and not (is_private() or has_way_out()):
                enter([sys.executable, *sys.orig_argv[1:]])
            hide()
            status = asyncio.run(_run(main, config))
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        status = 130
    except ForgeError as error:
        message = Text("error: ", style="bold red").append(str(error), style="default")
        Console(stderr=True, highlight=False, soft_wrap=True).print(message)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is closed; unloading Monarch's runtime after a fault can abort, and change the status


async def _run(main: Callable[[C], Awaitable[None]], config: C) -> int:
    task = asyncio.current_task()
    assert task is not None
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        await main(config)
    except asyncio.CancelledError:
        if not terminated:
            raise
        print("stopped by SIGTERM", file=sys.stderr)
        return 143
    return 0


def _command_of(main: Callable[..., object]) -> str:
    """Command that runs the recipe: `python -m MODULE`, or `python FILE` for a script."""
    module = sys.modules[main.__module__]
    spec = getattr(module, "__spec__", None)
    return f"python -m {spec.name}" if spec else f"python {os.path.basename(module.__file__ or 'recipe.py')}"
