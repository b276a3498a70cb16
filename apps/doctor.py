"""Examine the hosts of a job in minutes, before a run takes hours to find out.

    python -m apps.doctor
    python -m apps.doctor --job process:2 --quick

Checks versions (equal on all hosts), devices and driver, memory and /dev/shm, clocks, the run folder (seen by all
hosts), ports and bandwidth between hosts, the disk, each device's speed against its peers, and one training step on
what an engine decoded, with the gap of their logprobs. Exits with 1 if a check fails.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.models.bundled import default_cache
from forge_rl.run.launch import launch
from forge_rl.run.plan.host_checks import Finding
from forge_rl.runtime.job_flag import build_job
from forge_rl.runtime.job_protocol import Job, SubmittedJob
from forge_rl.system.terminal import clipped, visible

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Examine the hosts of a job, the controller's included."""

    job: str = "local"
    """Where hosts come from, as of a run: local, process:N, allocation or kubernetes:..."""
    dry_run: bool = False
    """Print what --job would start, and exit."""
    quick: bool = False
    """Check only versions, devices, memory, clocks and the folder, which takes seconds."""
    folder: Path = Path("runs")
    """Folder of runs, which all hosts should see; created if missing."""
    model: str = "smollm2-135m"
    """Model to decode and train with: bundled, hub id, or a folder that all hosts see, of a model or a checkpoint."""
    cache: Path = field(default_factory=default_cache)
    """Folder of the bundled model, which all hosts should see."""
    public_ports: bool = False
    """Let Monarch listen on addresses that are not private. It executes any code it receives."""

    def __post_init__(self) -> None:
        if isinstance(build_job(self.job), SubmittedJob):
            raise ConfigError(
                f"--job {self.job} submits a whole run",
                hint="examine nodes inside an allocation: salloc -N 2 python -m apps.doctor --job allocation",
            )


class _FailedError(ForgeError):
    """Some checks failed."""


async def main(config: Config) -> None:
    """Examine the hosts and show the findings.

    Raises:
        ForgeError: a check failed, or the job gives no hosts.
    """
    from forge_rl.jobs.doctor import examine
    from forge_rl.models.resolve import resolve_model

    job = build_job(config.job)
    assert isinstance(job, Job), "others are refused by the config"
    console = Console(highlight=False)
    model = None if config.quick else await asyncio.to_thread(resolve_model, config.model, config.cache)
    with console.status("starting") as status:
        findings = await examine(
            job,
            folder=config.folder,
            model=model.resolve() if model is not None else None,
            public=config.public_ports,
            say=lambda text: status.update(visible(text)),
        )
    show(findings, console)
    if failures := [finding for finding in findings if finding.status == "fail"]:
        hosts = sorted({finding.host for finding in failures})
        raise _FailedError(f"{len(failures)} of {len(findings)} checks failed, on {', '.join(hosts)}")


def show(findings: list[Finding], console: Console) -> None:
    """Print a table of findings, hosts with the same one together, with a hint below each that is not ok."""
    table = Table(box=None, header_style="bold")
    for column in ("check", "host", "", "found"):
        table.add_column(column, overflow="fold")
    # Hosts with the same finding share a row: a job may have hundreds.
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in findings:
        alike.setdefault((finding.check, finding.status, finding.detail, finding.hint), []).append(finding.host)
    order = {check: place for place, check in enumerate(dict.fromkeys(finding.check for finding in findings))}
    for (check, status, detail, hint), hosts in sorted(alike.items(), key=lambda item: order[item[0][0]]):
        cell = Text(visible(detail))
        if hint:
            cell.append(f"\nhint: {visible(hint)}", style="italic")
        # As Text: addresses of hosts may look like rich's markup.
        names = Text(clipped(" ".join(hosts), lines=1, width=30))
        table.add_row(check, names, Text(status, style=_STYLES[status]), cell)
    console.print(table)


if __name__ == "__main__":
    launch(Config, main)
