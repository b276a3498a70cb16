"""Slurm batch scripts: names of jobs, checks of directives, and the script of a host that joins a run."""

from __future__ import annotations

import getpass
import hashlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.jobs.slurm_queue import DIRECTIVE

_OPTION = re.compile(r"[\w.,:=+@/%\[\]()*&|?-]*", flags=re.ASCII)
"""Characters allowed in a directive of a batch script."""
_GRACE_S = 60
"""Seconds before its time limit at which a host leaves."""


def job_name(folder: Path) -> str:
    """Return the name of the job that runs in a folder, the same from every login node."""
    # Of user and whole path, as the job's name has only the folder's own name.
    digest = hashlib.sha256(f"{getpass.getuser()} {folder.resolve()}".encode()).hexdigest()[:8]
    return f"forge_rl-{re.sub('[^A-Za-z0-9.-]', '-', folder.name)[:40]}-{digest}"


def hosts_name(folder: Path) -> str:
    """Return the name of all jobs with which the run in a folder requests hosts."""
    return f"{job_name(folder)}-host"


def host_script(command: Sequence[str], folder: Path, log: Path, options: str) -> str:
    """Return the script of a job of one node, in which a command lets it join the run in a folder.

    Args:
        log: file for the output.
        options: options of sbatch, separated by spaces.
    """
    directives = [
        f"--job-name={hosts_name(folder)}",
        *("--nodes=1", "--ntasks-per-node=1", "--no-requeue"),
        f"--signal=B:USR1@{_GRACE_S}",
        "--open-mode=append",
        f"--chdir={script_path(Path.cwd())}",
        f"--output={script_path(log).replace('%', '%%')}",
        *shlex.split(options),
    ]
    lines = ["#!/bin/bash", *(f"{DIRECTIVE}{directive}" for directive in directives), f"exec {shlex.join(command)}"]
    return "\n".join(lines) + "\n"


def script_path(path: Path) -> str:
    """Return a path in the form that a directive requires."""
    text = str(path)
    if re.search(r"[\x00-\x1f\"'\\]", text):
        raise ConfigError(f"{text!r} cannot be named in a batch script", hint="choose a folder without quotes")
    return f'"{text}"' if " " in text else text


def check_option(name: str, value: str) -> None:
    """Check that an option of --job may stand in a directive.

    Args:
        name: the option, as slurm:NAME.

    Raises:
        ConfigError: it may not.
    """
    if _OPTION.fullmatch(value) is None:
        raise ConfigError(
            f"--job {name} is {value!r}, which cannot stand in a batch script",
            hint="use letters, digits and the punctuation of Slurm's options",
        )


def check_options(name: str, options: str) -> None:
    """Check options of sbatch, separated by spaces, as `check_option` does."""
    for option in shlex.split(options):
        check_option(name, option)
        if not option.startswith("-"):
            raise ConfigError(f"--job {name} has {option!r}", hint="write --NAME=VALUE")
