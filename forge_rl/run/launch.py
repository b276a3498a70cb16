"""Runs a recipe from the command line: flags, signals, one clear error message, and the exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from forge_rl.errors import ForgeError
from forge_rl.flags.command_line import parse
from forge_rl.run.records.run_dir import choose_folder
from forge_rl.run.target import on_target
from forge_rl.runtime.isolation import Isolation
from forge_rl.runtime.job_flag import build_job
from forge_rl.runtime.job_protocol import LedJob, SubmittedJob
from forge_rl.runtime.private_network import enter, has_way_out, is_private
from forge_rl.system.lazy import LazyNames
from forge_rl.system.streams import outlive_readers
from forge_rl.system.terminal import shortened, visible
from forge_rl.system.variables import hide

C = TypeVar("C")

_FORECAST: LazyNames[Callable[[object], None]] = LazyNames({"show": "forge_rl.forecast.show:show_forecast"})
"""Plans of machines that are not at hand, which few commands ask for."""

_LAST_S = 20.0
"""Time in which tasks that a run has left end, and a program that got a second signal; then it exits."""


def launch(
    config_class: type[C],
    main: Callable[[C], Awaitable[None]],
    *,
    prog: str | None = None,
    args: Sequence[str] | None = None,
    shows_only: bool = False,
) -> None:
    """Parse flags and run a recipe; never returns.

        if __name__ == "__main__":
            launch(Config, main)

    Exit status: 0 after a complete run, 1 after an error, 2 for invalid flags, 130 after Ctrl-C, 143 after SIGTERM, 138
    after SIGUSR1, 129 after SIGHUP, unless it is ignored, as under nohup. A run continues when nobody reads its output.

    Args:
        config_class: frozen dataclass whose fields become flags and whose docstrings their help, see
            `forge_rl.flags.command_line.parse`. A field `isolation`
            decides whether the run gets its own network namespace; a field `plan`, whether to show the memory plan
            instead of running; a field `job`, where the run's hosts come from; a field `dry_run`, whether to show what
            that job would start. A method `check_effects` refuses settings that would have no effect.
        main: the recipe.
        prog: command shown by `--help`; by default `python -m` and the module.
        args: flags to parse; by default the command line's.
        shows_only: the program does nothing but print, and ends when nobody reads it any more, with status 141.
    """
    outlive_readers(ends=shows_only)
    try:
        # Defaults and checks of flags depend on the devices, which --on replaces by those of other machines.
        with on_target(sys.argv[1:] if args is None else args):
            config = parse(config_class, prog or _command_of(main), args)
            getattr(config, "check_effects", lambda: None)()
            if is_plan := vars(config).get("plan"):
                _show_plan(config, main)
        if is_plan:  # a plan that does not fit has raised
            status = 0
        elif isinstance(job := build_job(vars(config).get("job", "local")), SubmittedJob):
            status = _submit(config, job, main)
        elif vars(config).get("dry_run"):
            print(job.describe(_command()))
            status = 0
        # The scheduler starts this command in several processes, and another one leads the run.
        elif isinstance(job, LedJob) and not job.leads:
            status = 0
        else:
            isolation = vars(config).get("isolation", Isolation())
            if isolation.private_network and not (is_private() or has_way_out()):
                enter([sys.executable, *sys.orig_argv[1:]])
            # Before threads run: the process's secret variables move, out of what /proc shows to others.
            hide()
            # Never closed: that would wait for tasks that ignore their cancellation.
            runner = asyncio.Runner()
            try:
                status = runner.run(_run(main, config))
            finally:
                runner.run(_end_tasks())
    except KeyboardInterrupt:
        _say("stopped by Ctrl-C")
        status = 130
    except ForgeError as error:
        _tell(error)
        status = 1
    except Exception:
        print(shortened(traceback.format_exc()), end="", file=sys.stderr)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Everything is closed. Unloading Monarch's runtime after a fault can abort, which would change the status.
    os._exit(status)


def _tell(error: ForgeError) -> None:
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    message = Text("error: ", style="bold red").append(visible(shortened(text)), style="default")
    Console(stderr=True, highlight=False, soft_wrap=True).print(message)


def _show_plan(config: object, main: object) -> None:
    """Show the plan of a run on this machine, or on the one that `--on` names.

    On this machine it first makes what the recipe's function `start` makes, if there is one, so that rewards, worlds,
    tasks and flags that a start refuses are refused here.
    """
    from forge_rl.run.plan.memory import show_plan
    from forge_rl.run.run_config import RunConfig

    assert isinstance(config, RunConfig), f"{type(config).__name__} has a flag --plan"
    if config.target.on:
        _FORECAST["show"](config)
        return
    module = sys.modules.get(main.__module__)
    start = getattr(module, "start", None)
    # The recipe's own function, and not the class `forge_rl.start` that it may import under this name.
    if callable(start) and start.__module__ == main.__module__:
        start(config)
    show_plan(config)


async def _run(main: Callable[[C], Awaitable[None]], config: C) -> int:
    task = asyncio.current_task()
    assert task is not None
    loop, process = asyncio.get_running_loop(), os.getpid()
    received: list[signal.Signals] = []

    def stop(number: int, _: object) -> None:
        # A fork inherits the handler; the signal that it got is no request to this run.
        if os.getpid() != process:
            return
        # Two different signals count as one request: systemd sends SIGHUP with SIGTERM, and a scheduler may follow a
        # user's Ctrl-C, which asyncio handles. So do several notices of a scheduler, one of each host.
        is_second = number in received and number != signal.SIGUSR1
        if is_second:
            # A thread, since a blocked event loop or a task that ignores its cancellation could hold up the exit.
            exiting = threading.Timer(_LAST_S, os._exit, [128 + number])
            exiting.daemon = True
            exiting.start()
        if is_second or not (received or task.cancelling()):
            loop.call_soon_threadsafe(task.cancel)
        received.append(signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            # Unlike asyncio's handlers, these also run while the event loop is blocked.
            signal.signal(number, stop)
    try:
        await main(config)
    except asyncio.CancelledError:
        # Somebody else cancelled the task: that is no signal's exit status.
        if not received:
            raise
        _say(f"stopped by {received[0].name}")
        return 128 + received[0]
    return 0


async def _end_tasks() -> None:
    """Cancel all tasks that are left, and wait for them for a while."""
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_LAST_S)


def _submit(config: object, job: SubmittedJob, main: Callable[..., object]) -> int:
    """Run the command as a job that includes the controller, in the folder that a local run would have."""
    # "python -m recipes.grpo" and "python grpo.py" both give "grpo", as in the folder of a local run.
    recipe = _command_of(main).removesuffix(".py").replace("/", ".").rpartition(".")[2].rpartition(" ")[2]
    folder, notes = choose_folder(config, recipe, vars(config)["out"])
    if vars(config)["dry_run"]:
        print(job.describe(_command(), folder))
        return 0
    for note in notes:
        _say(note)
    return job.submit(_command(), folder, _say)


def _command() -> list[str]:
    """Return the command that started this process, without --dry-run."""
    return [sys.executable, *(word for word in sys.orig_argv[1:] if word != "--dry-run")]


def _say(text: str) -> None:
    """Print to stderr, if anybody reads it."""
    print(text, file=sys.stderr)


def _command_of(main: Callable[..., object]) -> str:
    """Return the command that runs the recipe: `python -m MODULE`, or `python FILE` for a script."""
    module = sys.modules[main.__module__]
    spec = getattr(module, "__spec__", None)
    return f"python -m {spec.name}" if spec else f"python {os.path.basename(module.__file__ or 'recipe.py')}"
