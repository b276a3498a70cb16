"""What is judged of hosts from their facts; and the doctor on real hosts."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from apps.doctor import Config
from forge_rl.engines.host import HostInfo
from forge_rl.errors import ConfigError, ReplicaError
from forge_rl.flags.command_line import parse
from forge_rl.jobs import doctor
from forge_rl.jobs.doctor import Examination, examine
from forge_rl.run.plan.host_checks import Finding, failed_hosts, judge_disk, judge_facts, judge_gap, judge_speeds
from forge_rl.run.start import hosts as hosts_module
from forge_rl.runtime.host_facts import Clock, HostFacts, write_rate
from forge_rl.runtime.job_flag import build_job
from forge_rl.runtime.job_protocol import Job
from tests.tiny import bundled_folder, make_tiny_model

GIB = 1 << 30
GOOD = HostFacts(
    versions={"python": "3.11.7", "torch": "2.13.0"},
    devices=("H100, 81559 MiB",) * 8,
    driver="580.1",
    problem="",
    memory_bytes=64 * GIB,
    available_bytes=50 * GIB,
    shm_bytes=32 * GIB,
    shm_free_bytes=30 * GIB,
    space="a",
)


def bad(findings: list[Finding]) -> list[tuple[str, str, str]]:
    assert all(bool(finding.hint) == (finding.status != "ok") for finding in findings), "a hint for each failure"
    return [(finding.check, finding.host, finding.status) for finding in findings if finding.status != "ok"]


@pytest.mark.parametrize(
    ("changes", "check", "status"),
    [
        ({}, "", ""),
        ({"versions": {"python": "3.11.7", "torch": "2.12.0"}}, "versions", "fail"),
        ({"driver": "570.2"}, "devices", "warn"),
        ({"devices": (), "driver": ""}, "", ""),
        ({"devices": (), "driver": "", "problem": "No devices were found"}, "devices", "fail"),
        ({"available_bytes": GIB}, "memory", "fail"),
        ({"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, "/dev/shm", "fail"),
        ({"shm_free_bytes": 1000}, "/dev/shm", "fail"),
    ],
)
def test_a_host_that_differs_or_lacks_something_is_named(changes: Mapping[str, object], check: str, status: str):
    facts = {"local": GOOD, "a": GOOD, "b": replace(GOOD, **changes)}  # type: ignore[arg-type]
    assert bad(judge_facts(facts, {})) == ([(check, "b", status)] if check else [])


def test_a_clock_is_off_only_by_more_than_the_round_trip_explains():
    clocks = {
        "a": Clock(offset_s=-0.3, error_s=0.01),
        "b": Clock(offset_s=1.5, error_s=0.01),
        "c": Clock(offset_s=1.5, error_s=1.2),
        "d": Clock(offset_s=-60.0, error_s=0.01),
    }
    findings = judge_facts(dict.fromkeys(["local", *clocks], GOOD), clocks)
    assert bad(findings) == [("clock", "b", "warn"), ("clock", "d", "fail")]
    assert failed_hosts(findings) == {"d": "clock: -60.000 s, give or take 0.010 s"}


def test_a_device_slower_than_its_peers_is_named():
    speeds = {"a": {"gpu 0": 600e12, "gpu 1": 590e12}, "b": {"gpu 0": 610e12, "gpu 1": 300e12}}
    (fine, slow) = judge_speeds(speeds, cpu=False)
    assert (fine.status, slow.status) == ("ok", "fail")
    assert slow.detail == "gpu 1: 300 TFLOP/s, 50% of the usual 595"
    assert bad(judge_speeds(speeds, cpu=True)) == [], "on CPUs other programs explain that much"


def test_disks_and_gaps_are_judged(tmp_path: Path):
    assert write_rate(tmp_path, 1 << 20) > 0
    assert list(tmp_path.iterdir()) == []
    findings = [judge_disk("a", 500 * GIB, 1e9), judge_disk("b", 500 * GIB, 1e6), judge_disk("c", GIB, 1e9)]
    findings += [judge_gap("a", 1e-6, 1e-5, 32), judge_gap("b", 0.3, 1.0, 32), judge_gap("c", float("nan"), 1.0, 32)]
    assert bad(findings) == [
        ("disk", "b", "warn"),
        ("disk", "c", "fail"),
        ("train and decode", "b", "fail"),
        ("train and decode", "c", "fail"),
    ]


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("flags", [("--job", "slurm:nodes=2"), ("--job", "slurm:nodes=2", "--dry-run")])
def test_a_job_that_submits_a_whole_run_is_one_clear_message(flags: tuple[str, ...]):
    with pytest.raises(ConfigError, match="--job slurm:nodes=2 submits a whole run") as caught:
        parse(Config, "doctor", flags)
    assert "--job allocation" in caught.value.hint


async def test_a_folder_that_cannot_be_written_is_one_clear_message(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"the folder .*file/runs cannot be written: Not a directory"):
        await examine(
            cast(Job, build_job("local")), folder=tmp_path / "file" / "runs", model=None, public=False, say=print
        )


async def test_the_doctor_finds_nothing_wrong_with_good_hosts(tmp_path: Path):
    """It starts an engine and a trainer, and moves bytes between hosts."""

    job = build_job("process:1")
    assert isinstance(job, Job)
    model = make_tiny_model(tmp_path / "model", bundled_folder())
    (tmp_path / "runs").mkdir()
    findings = await examine(job, folder=tmp_path / "runs", model=model, public=False, say=lambda text: None)
    speeds = ("matmul", "disk", "clock")  # of a machine that may be busy
    assert [finding for finding in findings if finding.status != "ok" and finding.check not in speeds] == []
    checks = [
        "versions",
        "devices",
        "memory",
        "/dev/shm",
        "run folder",
        "disk",
        "ports",
        "rdma",
        "collective",
        "matmul",
    ]
    for host in ("local", "host0"):
        checks_of_host = [finding.check for finding in findings if finding.host == host and finding.check in checks]
        assert checks_of_host == checks
    (learned,) = [finding for finding in findings if finding.check == "train and decode"]
    assert learned.detail.startswith("logprob gap ")
    assert learned.detail.endswith("over 32 tokens")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("failing", ["facts", "listen", "unshare"])
async def test_a_host_that_fails_is_a_finding_and_the_others_are_examined(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[tuple[str, str]] = []

    class Host:
        """Answers the doctor as a sound host does, but for b."""

        def __init__(self, name: str) -> None:
            self.name = name

        async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
            calls.append((self.name, method))
            if (self.name, method) == ("b", failing):
                raise ReplicaError(f"no answer to {method}", service="doctor")
            if method == "answer_probe":
                shutil.copyfile(*args)
            answers = {"facts": GOOD, "clock": time.time(), "listen": [("::1", 1)], "reach": [("::1", 1)]}
            answers |= {"answer_probe": "", "disk": (500 * GIB, 1e9), "fetch": 1e9, "all_reduce": 1e9}
            return answers.get(method, {})

    cluster = cast(Any, SimpleNamespace(sharing=set[str](), shares_files=lambda host: True))
    examination = Examination(cluster=cluster, faults=cast(Any, None), folder=tmp_path, say=lambda text: None)
    examination.replicas = {name: cast(Any, Host(name)) for name in ("local", "a", "b", "c")}

    async def sound(_: Examination, host: str, __: Path) -> Finding:
        return Finding(check="train and decode", host=host, status="ok", detail="")

    monkeypatch.setattr(doctor, "_train_and_decode", sound)
    await doctor._examine(examination, tmp_path)
    check = {"facts": "facts", "listen": "ports", "unshare": "rdma"}[failing]
    assert bad(examination.findings) == [(check, "b", "fail")]
    assert calls[-1] == ("c", "speeds")
    assert ("c", "all_reduce") in calls
    assert ("b", "all_reduce") not in calls


async def test_a_folder_that_cannot_be_written_is_a_finding(tmp_path: Path):
    folder = tmp_path / "file"  # in which not even root can write
    folder.write_text("")
    examination = Examination(cluster=cast(Any, None), faults=cast(Any, None), folder=folder, say=lambda text: None)
    finding = await doctor._folder(examination, "local")
    assert (finding.check, finding.status) == ("run folder", "fail")
    assert finding.detail == f"the controller cannot write to {folder}: Not a directory"
    with pytest.raises(ConfigError, match="file cannot be written: Not a directory"):
        await examine(cast(Any, None), folder=folder, model=None, public=False, say=lambda text: None)


def test_a_run_goes_on_without_a_host_that_fails_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(HostFacts, "of_this_host", staticmethod(lambda: GOOD))
    info = HostInfo(kind="cpu", gpus=(), gpu_bytes=0, cores=2, memory_bytes=GIB, space="a")
    clock = Clock(offset_s=0.0, error_s=0.0)
    old = replace(GOOD, versions={**GOOD.versions, "torch": "2.12.0"})
    answers = {"a": (info, GOOD, clock), "b": (info, old, clock)}
    warnings: list[str] = []
    lost_hosts: dict[str, str] = {}
    cluster = cast(Any, SimpleNamespace(lose=lost_hosts.__setitem__))

    def sound(placement: str, given: Mapping[str, Any]) -> list[str]:
        config = cast(Any, SimpleNamespace(placement=placement))
        return list(hosts_module.sound_hosts(config, cluster, given, warnings.append))

    assert sound("trainer=a", answers) == ["a"]
    assert list(lost_hosts) == ["b"]
    assert warnings == [
        "host b fails the checks at the start: versions: torch 2.12.0 instead of 2.13.0; the run goes on without it",
    ]
    with pytest.raises(ConfigError, match="host b fails"):
        sound("generator=a+b", answers)
    with pytest.raises(ConfigError, match="host b fails"):
        sound("auto", {"b": answers["b"]})
