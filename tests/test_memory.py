"""Memory of the machine and of a container, whose files are written out here."""

from __future__ import annotations

import os
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from forge_rl.system import cgroups
from forge_rl.system.memory import available_bytes, host_bytes

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("version", "limit", "used"),
    [("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")],
)
def test_a_containers_limit_counts_and_its_copies_of_files_are_available(
    version: str, limit: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "_CGROUP", tmp_path)
    monkeypatch.setattr(cgroups, "_MEMBERSHIPS", tmp_path / "none")
    folder = tmp_path / version
    folder.mkdir(exist_ok=True)
    assert host_bytes() == MACHINE
    (folder / limit).write_text("1000\n")
    (folder / used).write_text("900\n")
    (folder / "memory.stat").write_text("anon 500\ninactive_file 300\nactive_file 50\n")
    assert (host_bytes(), available_bytes()) == (1000, 1000 - (900 - 350))
    (folder / used).write_text("1400\n")
    assert available_bytes() == 0
    (folder / limit).write_text("max\n")
    assert host_bytes() == MACHINE
    assert 0 < available_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("membership", "version", "limit", "used"),
    [
        ("0::/slurm/job_7/step_0\n", "", "memory.max", "memory.current"),
        (
            "5:cpu,memory:/slurm/job_7/step_0\n0::/init\n",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ],
)
def test_the_limit_of_a_job_counts_for_its_processes(
    membership: str, version: str, limit: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "_MEMBERSHIPS", tmp_path / "memberships")
    (tmp_path / "memberships").write_text(membership)
    folder = tmp_path / "cgroup" / version
    for part, limit_text, used_bytes in (("slurm", "5000", 1000), ("job_7", "4000", 900), ("step_0", "max", 800)):
        folder /= part
        folder.mkdir(parents=True)
        (folder / limit).write_text(limit_text)
        (folder / used).write_text(str(used_bytes))
        # Version 1 has the group's own cache and, with a prefix, that of all below it, too.
        cache = "inactive_file 1\ntotal_inactive_file 100\n" if version else "inactive_file 100\n"
        (folder / "memory.stat").write_text(cache)
    assert (host_bytes(), available_bytes()) == (4000, 4000 - 800)
    (folder.parent / limit).write_text("max")
    assert (host_bytes(), available_bytes()) == (5000, 5000 - 900)
    (tmp_path / "memberships").write_text(membership.replace("/slurm", "/../slurm"))
    assert host_bytes() == MACHINE, "it is outside of what the container sees"
