"""Flags of a plan for other machines; of the model, a config.json is enough."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from forge_rl.engines.device_types import parse_machine
from forge_rl.engines.devices import assumed_gpus
from forge_rl.errors import ConfigError, check_flags
from forge_rl.flags.categories import Category

LOCAL = "local"
_MOST_HOSTS = 1024
_NOTHING = {"on": "", "hosts": 1, "model_config": None, "prompt_tokens": 0, "answer_tokens": 0}
"""Values of the fields of a plan for this machine, or of no plan."""


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Machines to plan for, with --plan."""

    CATEGORY: ClassVar[Category] = Category.OF_COMMAND

    on: str = ""
    """With --plan: the machines to plan for, as COUNTxTYPE for each host, such as 8xH100-80G; local measures this
    machine. Also predicts the layout and the time of a step."""
    hosts: int = 1
    """With --on: number of such hosts."""
    model_config: Path | None = None
    """With --on: a config.json, or its folder, to plan for in place of --model; no weights are needed."""
    prompt_tokens: int = 0
    """With --on: mean tokens of a prompt; by default all that --generator.max-model-len leaves to it."""
    answer_tokens: int = 0
    """With --on: mean tokens of an answer; by default --generator.max-tokens."""

    def __post_init__(self) -> None:
        if self.model_config is not None:
            object.__setattr__(self, "model_config", Path(self.model_config))
        check_flags(
            self, "--", minimum={"hosts": 1, "prompt_tokens": 0, "answer_tokens": 0}, maximum={"hosts": _MOST_HOSTS}
        )
        if not self.on and vars(self) != _NOTHING:
            raise ConfigError(
                "--hosts, --model-config, --prompt-tokens and --answer-tokens belong to a plan for other machines",
                hint="add --plan --on, such as --on 8xH100-80G or --on local",
            )
        if self.on == LOCAL and self.hosts > 1:
            raise ConfigError(f"--on local is this machine, and --hosts is {self.hosts}", hint="leave out --hosts")
        if self.on and self.on != LOCAL:
            parse_machine(self.on)


@contextlib.contextmanager
def on_target(args: Sequence[str]) -> Iterator[None]:
    """Parse and plan inside the context as if on the machines that `--on` of a command line names, if it has one.

    Defaults and checks of other flags depend on the devices.

    Raises:
        ConfigError: the machine is unknown.
    """
    # Read before the flags are parsed, since the parser's own defaults already depend on the machine.
    pairs = dict(itertools.pairwise([*args, ""]))
    flags = pairs | dict(arg.split("=", 1) for arg in args if arg.startswith("--") and "=" in arg)
    name, hosts = flags.get("--on", ""), flags.get("--hosts", "1")
    if "--plan" not in args or name in ("", LOCAL):
        yield
        return
    count, device = parse_machine(name)
    # A wrong number is reported by the parser, which sees it next.
    num_hosts = int(hosts) if hosts.isdecimal() and len(hosts) < 5 else 1
    with assumed_gpus(count * max(1, num_hosts), device.memory):
        yield
