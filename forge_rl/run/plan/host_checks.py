"""Judges the facts and speeds of hosts: which differ from the others, lack something, or are slow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from forge_rl.runtime.host_facts import Clock, HostFacts

_GIB = 1 << 30
LEAST_AVAILABLE_BYTES = 2 * _GIB
LEAST_SHM_BYTES = _GIB
"""A container's /dev/shm has 64 MB unless its size is set."""
LEAST_DISK_BYTES = 2 * _GIB
LEAST_WRITE_RATE = 50e6
CLOCK_OFF_S = 5.0
CLOCK_WARN_S = 0.5
SLOW_SHARE = 0.8
"""Share of its peers' median speed below which a device is slow."""
SLOW_CPU_SHARE = 0.5
"""The same for CPUs, which other programs use too."""
MOST_GAP = 0.05
"""Mean absolute difference of logprobs between engine and trainer above which rounding does not explain it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check of one host.

    Finding(check="shm", host="host1", status="fail", detail="64 MiB", hint="size /dev/shm")
    """

    check: str
    host: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    hint: str = ""


def judge_facts(facts: Mapping[str, HostFacts], clocks: Mapping[str, Clock]) -> list[Finding]:
    """Judge the facts of all hosts.

    Args:
        facts: facts by host. The first host is the controller's, whose versions the others must have.
        clocks: clocks of the other hosts, by host.
    """
    reference = next(iter(facts.values()))
    # The hosts' majority decides: the controller itself may have no GPU.
    usual_driver = _most_common([sample.driver for sample in facts.values() if sample.driver])
    findings = []
    for host, host_facts in facts.items():
        findings.append(_versions(host, host_facts, reference))
        findings.append(_devices(host, host_facts, usual_driver))
        findings.append(_memory(host, host_facts))
        findings.append(_shm(host, host_facts))
        if host in clocks:
            findings.append(_clock(host, clocks[host]))
    return findings


def judge_speeds(speeds: Mapping[str, Mapping[str, float]], *, cpu: bool) -> list[Finding]:
    """Compare matmul speeds with the median of all devices.

    Args:
        speeds: FLOP/s by host and device.
        cpu: whether the devices are CPUs.
    """
    all_speeds = [speed for devices in speeds.values() for speed in devices.values()]
    # The median, as one slow device moves a mean.
    median = statistics.median(all_speeds) if all_speeds else 0.0
    share = SLOW_CPU_SHARE if cpu else SLOW_SHARE
    findings = []
    for host, devices in speeds.items():
        slow = {device: speed for device, speed in devices.items() if speed < share * median}
        detail = ", ".join(f"{device}: {speed / 1e12:.3g} TFLOP/s" for device, speed in (slow or devices).items())
        if slow:
            detail += f", {min(slow.values()) / median:.0%} of the usual {median / 1e12:.3g}"
        hint = "see who else uses it, its temperature and clocks (nvidia-smi -q -d PERFORMANCE); leave the host out"
        status: Literal["ok", "fail"] = "fail" if slow else "ok"
        findings.append(Finding(check="matmul", host=host, status=status, detail=detail, hint=hint if slow else ""))
    return findings


def judge_disk(host: str, free_bytes: int, rate: float) -> Finding:
    """Judge the free space and the write speed, in bytes per second, of the run folder's disk."""
    detail = f"{free_bytes / _GIB:.0f} GiB free, {rate / 1e6:.0f} MB/s"
    if free_bytes < LEAST_DISK_BYTES:
        hint = "free space, or choose another --folder"
        return Finding(check="disk", host=host, status="fail", detail=detail, hint=hint)
    if rate < LEAST_WRITE_RATE:
        hint = "checkpoints will take long: choose a faster file system"
        return Finding(check="disk", host=host, status="warn", detail=detail, hint=hint)
    return Finding(check="disk", host=host, status="ok", detail=detail)


def judge_gap(host: str, mean: float, max_gap: float, tokens: int) -> Finding:
    """Judge the absolute differences between an engine's and a trainer's logprobs of the same tokens."""
    detail = f"logprob gap {mean:.1e}, at most {max_gap:.1e}, over {tokens} tokens"
    is_small = mean <= MOST_GAP  # False for NaN
    hint = (
        "" if is_small else "engine and trainer disagree: compare the versions of vllm and torch, and check the device"
    )
    return Finding(check="train and decode", host=host, status="ok" if is_small else "fail", detail=detail, hint=hint)


def failed_hosts(findings: list[Finding]) -> dict[str, str]:
    """Return the failures of each host that failed a check, in words."""
    failures: dict[str, list[str]] = {}
    for finding in findings:
        if finding.status == "fail":
            failures.setdefault(finding.host, []).append(f"{finding.check}: {finding.detail}")
    return {host: "; ".join(causes) for host, causes in failures.items()}


def _most_common(values: list[str]) -> str:
    return statistics.mode(values) if values else ""


def _versions(host: str, facts: HostFacts, reference: HostFacts) -> Finding:
    differences = {name: version for name, version in facts.versions.items() if version != reference.versions.get(name)}
    missing = [name for name, version in facts.versions.items() if version == "missing"]
    detail = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    if differences:
        detail = ", ".join(
            f"{name} {version} instead of {reference.versions.get(name)}" for name, version in differences.items()
        )
    elif missing:
        detail = f"{', '.join(missing)} missing"
    if not differences and not missing:
        return Finding(check="versions", host=host, status="ok", detail=detail)
    hint = "install the same environment on all hosts: the same image, or the same --require-hashes lock"
    return Finding(check="versions", host=host, status="fail", detail=detail, hint=hint)


def _devices(host: str, facts: HostFacts, driver: str) -> Finding:
    if facts.problem:
        hint = "reload the driver, or leave the host out"
        return Finding(check="devices", host=host, status="fail", detail=facts.problem, hint=hint)
    if not facts.devices:
        return Finding(check="devices", host=host, status="ok", detail="CPU only")
    counts = {name: facts.devices.count(name) for name in dict.fromkeys(facts.devices)}
    detail = ", ".join(f"{count} x {name}" for name, count in counts.items()) + f", driver {facts.driver}"
    if facts.driver != driver:
        hint = f"most hosts have driver {driver}: install the same on all"
        return Finding(check="devices", host=host, status="warn", detail=detail, hint=hint)
    return Finding(check="devices", host=host, status="ok", detail=detail)


def _memory(host: str, facts: HostFacts) -> Finding:
    detail = f"{facts.available_bytes / _GIB:.1f} of {facts.memory_bytes / _GIB:.1f} GiB available"
    if facts.available_bytes >= LEAST_AVAILABLE_BYTES:
        return Finding(check="memory", host=host, status="ok", detail=detail)
    hint = "end other processes there, or give the host more memory"
    return Finding(check="memory", host=host, status="fail", detail=detail, hint=hint)


def _shm(host: str, facts: HostFacts) -> Finding:
    detail = f"{facts.shm_free_bytes / _GIB:.1f} of {facts.shm_bytes / _GIB:.1f} GiB free"
    if facts.shm_bytes < LEAST_SHM_BYTES:
        hint = "size it, as it holds the weights: --job kubernetes:shm=64Gi, docker --shm-size, or remount it"
        return Finding(check="/dev/shm", host=host, status="fail", detail=detail, hint=hint)
    if facts.shm_free_bytes < LEAST_SHM_BYTES:
        hint = "delete what earlier programs left in /dev/shm"
        return Finding(check="/dev/shm", host=host, status="fail", detail=detail, hint=hint)
    return Finding(check="/dev/shm", host=host, status="ok", detail=detail)


def _clock(host: str, clock: Clock) -> Finding:
    detail = f"{clock.offset_s:+.3f} s, give or take {clock.error_s:.3f} s"
    # A slow round trip explains part of the offset; only the rest is the clock's.
    offset_s = max(0.0, abs(clock.offset_s) - clock.error_s)
    if offset_s <= CLOCK_WARN_S:
        return Finding(check="clock", host=host, status="ok", detail=detail)
    hint = "synchronise it by NTP or PTP (chronyc tracking)"
    return Finding(
        check="clock", host=host, status="fail" if offset_s > CLOCK_OFF_S else "warn", detail=detail, hint=hint
    )
