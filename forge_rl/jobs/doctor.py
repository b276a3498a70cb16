"""Examines the hosts of a job, before a run takes hours to find out: `python -m apps.doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forge_rl.engines.factory import decode_environment, train_environment
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.jobs.host_check_actors import DecodeCheckActor, HostCheckActor, TrainCheckActor
from forge_rl.run.plan.host_checks import Finding, judge_disk, judge_facts, judge_gap, judge_speeds
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.host_facts import HostFacts
from forge_rl.runtime.job_protocol import Job, JobListener
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import Service
from forge_rl.services.host_actor import appears, ask_facts
from forge_rl.system.tasks import task_group

_CALL_S = 60.0
_START_S = 120.0
"""Timeout of a process's start, whose imports may come from a slow disk."""
_TRIAL_S = 300.0
"""Timeout of a call that starts an engine or a trainer, on a host that may be busy."""
_WRITTEN = 64 << 20
_MOVED = 64 << 20
"""Bytes written to a disk, and bytes moved between hosts."""
_SERVICE = "doctor"

Ask = Callable[[str], Awaitable[Finding]]
T = TypeVar("T")


@dataclass(kw_only=True)
class Examination:
    """The answering hosts, their facts, and the findings so far."""

    cluster: Cluster
    faults: Faults
    folder: Path
    """Folder that all hosts should see."""
    say: Callable[[str], None]
    findings: list[Finding] = field(default_factory=list)
    replicas: dict[str, Replica] = field(default_factory=dict)
    """A process on each host that answers."""
    facts: dict[str, HostFacts] = field(default_factory=dict)

    async def each(self, check: str, ask: Ask, *, machines_once: bool = False) -> None:
        """Ask all hosts, those simulated on one machine one after another; record errors as failed checks.

        Args:
            machines_once: ask only the first of several hosts that are simulated on one machine.
        """
        self.say(check)
        machines: dict[str, list[str]] = {}
        for host in self.replicas:
            machines.setdefault(self.facts[host].space if host in self.facts else host, []).append(host)

        async def one_machine(hosts: list[str]) -> None:
            for host in hosts[:1] if machines_once else hosts:
                self.findings.append(await _judged(check, host, ask(host)))

        async with task_group() as group:
            for hosts in machines.values():
                group.create_task(one_machine(hosts))

    async def answers(self, check: str, ask: Callable[[str], Awaitable[T]]) -> dict[str, T]:
        """Ask all hosts, one after another; one that fails is a finding, and is asked nothing more."""
        answers: dict[str, T] = {}
        for host in list(self.replicas):
            try:
                answers[host] = await ask(host)
            except ForgeError as error:
                self.findings.append(_failure(check, host, error))
                del self.replicas[host]
        return answers

    async def call(self, host: str, method: str, *args: object) -> Any:
        """Call the process on a host."""
        return await self.replicas[host].call(method, *args, deadline_s=_CALL_S)


async def examine(
    job: Job, *, folder: Path, model: Path | None, public: bool, say: Callable[[str], None]
) -> list[Finding]:
    """Examine the controller's host and a job's hosts.

        findings = await examine(build_job("process:2"), folder=Path("runs"), model=None, public=False, say=print)

    Args:
        folder: folder in which the processes' logs are written, and that all hosts should see; created if missing.
        model: Hugging Face folder to train and decode with; None skips every check that takes longer than seconds.
        public: whether Monarch may listen on addresses that are not private.
        say: called with the name of each check as it begins.

    Raises:
        ForgeError: the job gives no hosts, or the folder cannot be written.
    """
    folder = await asyncio.to_thread(folder.resolve)
    logs = folder / f".doctor-{secrets.token_hex(4)}"
    try:
        logs.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be written: {error.strerror or error}", hint="name another one with --folder"
        ) from error
    faults = Faults()
    faults.install()
    try:
        async with job.open(JobListener(say=say)) as hosts:
            cluster = Cluster(logs, hosts, may_be_public=public)
            examination = Examination(cluster=cluster, faults=faults, folder=folder, say=say)
            try:
                async with _asked(examination):
                    await _examine(examination, model)
            finally:
                faults.closing = True
                await cluster.close()
        return examination.findings
    finally:
        shutil.rmtree(logs, ignore_errors=True)


async def _examine(examination: Examination, model: Path | None) -> None:
    answers = await examination.answers("facts", lambda host: ask_facts(examination.replicas[host], deadline_s=_CALL_S))
    if not answers:
        return
    examination.facts |= {host: facts for host, (facts, _) in answers.items()}
    # The controller's own clock is the reference.
    clocks = {host: clock for host, (_, clock) in answers.items() if host != THIS_HOST}
    examination.findings += judge_facts(examination.facts, clocks)
    await examination.each("run folder", lambda host: _folder(examination, host))
    if model is None:
        return
    await examination.each("disk", lambda host: _disk(examination, host))
    await _network(examination)
    await _speeds(examination)
    await examination.each(
        "train and decode", lambda host: _train_and_decode(examination, host, model), machines_once=True
    )


@contextlib.asynccontextmanager
async def _asked(examination: Examination) -> AsyncIterator[None]:
    """Start a process on each host; one that does not start is a finding."""
    # A host whose process dies is a finding here, not a fatal fault.
    service = Service(_SERVICE, examination.cluster, examination.faults, recoverable=True)

    async def start(host: str) -> None:
        replica = service.spawn(HostCheckActor, host=host)
        try:
            await service.watch(replica, deadline_s=_START_S)
        except ForgeError as error:
            hint = "see whether the host has this environment at the same paths"
            problem = Finding(check="start", host=host, status="fail", detail=_line(error), hint=hint)
            examination.findings.append(problem)
        else:
            examination.replicas[host] = replica

    try:
        examination.say("starting a process on each host")
        async with task_group() as group:
            for host in examination.cluster.hosts:
                group.create_task(start(host))
        # Processes start in any order; findings are listed in the cluster's order.
        order = examination.cluster.hosts
        examination.replicas = {host: examination.replicas[host] for host in order if host in examination.replicas}
        yield
    finally:
        examination.faults.closing = True
        await service.stop()


async def _folder(examination: Examination, host: str) -> Finding:
    """Have the host copy a file that this one wrote, and check whether the copy appears here."""
    probe = examination.folder / f".probe-{secrets.token_hex(8)}"
    answer = probe.with_name(f"{probe.name}-answer")
    try:
        await asyncio.to_thread(probe.write_text, probe.name)
        problem = str(await examination.call(host, "answer_probe", probe, answer))
        if not problem and not await appears(answer, probe.name):
            problem = "what it writes there does not appear here"
    except OSError as error:  # such as a full disk
        detail = f"the controller cannot write to {examination.folder}: {error.strerror or error}"
        hint = "free space, or name another one with --folder"
        return Finding(check="run folder", host=host, status="fail", detail=detail, hint=hint)
    finally:
        for path in (probe, answer):
            with contextlib.suppress(OSError):
                path.unlink()
    hint = "checkpoints and models go through the controller; a file system that all hosts share is faster"
    if problem:
        return Finding(check="run folder", host=host, status="warn", detail=problem, hint=hint)
    # From here on, the cluster treats the host's disk as shared.
    examination.cluster.sharing.add(host)
    return Finding(check="run folder", host=host, status="ok", detail=str(examination.folder))


async def _disk(examination: Examination, host: str) -> Finding:
    folder = examination.folder if examination.cluster.shares_files(host) else None
    return judge_disk(host, *await examination.call(host, "disk", folder, _WRITTEN))


async def _network(examination: Examination) -> None:
    """Try connections and bandwidth from each host to the next one, and between all."""
    if len(examination.replicas) < 2:
        return
    # Hosts that are simulated on one machine reach each other over loopback.
    same_machine = len({facts.space for facts in examination.facts.values()}) == 1
    places = await examination.answers("ports", lambda host: examination.call(host, "listen", same_machine))
    hosts = list(places)
    neighbours = dict(zip(hosts, [*hosts[1:], *hosts[:1]], strict=True))
    reached_addresses: dict[str, list[tuple[str, int]]] = {}

    async def connect(host: str) -> Finding:
        target = neighbours[host]
        addresses = await examination.call(host, "reach", places[target])
        reached_addresses[host] = await examination.call(host, "reach", places[hosts[0]])
        detail = (
            f"reaches {target} at {addresses[0][0]}"
            if addresses
            else f"reaches none of {target}'s addresses: {places[target]}"
        )
        hint = "" if addresses else "open all ports between the hosts: firewall, NetworkPolicy, security group"
        return Finding(check="ports", host=host, status="ok" if addresses else "fail", detail=detail, hint=hint)

    async def fetch(host: str) -> Finding:
        buffer = await examination.call(neighbours[host], "share", _MOVED)
        rate = await examination.call(host, "fetch", buffer, _MOVED)
        detail = f"reads {rate / 1e9:.2f} GB/s from {neighbours[host]}, by Monarch"
        return Finding(check="rdma", host=host, status="ok", detail=detail)

    await examination.each("ports", connect)
    await examination.each("rdma", fetch)
    await examination.answers("rdma", lambda host: examination.call(host, "unshare"))
    # The collective needs the first host, and an address at which every other can reach it.
    living_hosts = [host for host in hosts if host in examination.replicas]
    if len(living_hosts) < 2 or living_hosts[0] != hosts[0]:
        return
    common = [
        place
        for place in reached_addresses.get(living_hosts[-1], [])
        if all(place in addresses for addresses in reached_addresses.values())
    ]
    if common:
        await _collective(examination, living_hosts, common[0])


async def _collective(examination: Examination, hosts: list[str], place: tuple[str, int]) -> None:
    """Sum a tensor over all hosts, which meet at an address of the first one."""
    examination.say("collective")
    calls = [examination.call(host, "all_reduce", rank, len(hosts), *place, _MOVED) for rank, host in enumerate(hosts)]
    for host, answer in zip(hosts, await asyncio.gather(*calls, return_exceptions=True), strict=True):
        if isinstance(answer, float):
            detail = f"sums {answer / 1e9:.2f} GB/s over {len(hosts)} hosts"
            examination.findings.append(Finding(check="collective", host=host, status="ok", detail=detail))
        elif isinstance(answer, ForgeError):
            hint = answer.hint or "see NCCL_DEBUG=INFO, and whether the interface is the right one"
            problem = Finding(check="collective", host=host, status="fail", detail=_line(answer), hint=hint)
            examination.findings.append(problem)
        elif isinstance(answer, BaseException):
            raise answer


async def _speeds(examination: Examination) -> None:
    speeds: dict[str, dict[str, float]] = {}

    async def measure(host: str) -> Finding:
        speeds[host] = await examination.call(host, "speeds")
        return Finding(check="matmul", host=host, status="ok", detail="")

    # Speeds are judged against each other below; of this check itself only failures are kept.
    num_before = len(examination.findings)
    await examination.each("matmul", measure)
    examination.findings[num_before:] = [
        finding for finding in examination.findings[num_before:] if finding.status == "fail"
    ]
    examination.findings += judge_speeds(speeds, cpu=not any(facts.devices for facts in examination.facts.values()))


async def _train_and_decode(examination: Examination, host: str, model: Path) -> Finding:
    """Sample with an engine, then train on the tokens in another process, and compare the logprobs."""
    # Processes of their own, which end with the call and so free the device.
    sampled = await _once(examination, host, DecodeCheckActor, decode_environment(0, replicas=1), "sample", model)
    trained = await _once(examination, host, TrainCheckActor, train_environment(1), "train", model, sampled)
    if not trained.finite:
        hint = "the device computes NaN: leave it out"
        return Finding(check="train and decode", host=host, status="fail", detail="the gradient is NaN", hint=hint)
    count = len(sampled.token_ids)
    return judge_gap(host, trained.mean_gap, trained.most_gap, count)


async def _once(
    examination: Examination, host: str, actor: type, env: Mapping[str, str], method: str, *args: object
) -> Any:
    """Start an actor in a fresh process on a host, call one method, and end the process."""
    service = Service(f"{_SERVICE}-{method}-{host}", examination.cluster, examination.faults, recoverable=True)
    try:
        replica = service.spawn(actor, host=host, env=env)
        await service.watch(replica, deadline_s=_START_S)
        return await replica.call(method, *args, deadline_s=_TRIAL_S)
    finally:
        await service.stop()


async def _judged(check: str, host: str, check_result: Awaitable[Finding]) -> Finding:
    try:
        return await check_result
    except ForgeError as error:
        return _failure(check, host, error)


def _failure(check: str, host: str, error: ForgeError) -> Finding:
    hint = error.hint or "leave the host out, or see what else runs there"
    return Finding(check=check, host=host, status="fail", detail=_line(error), hint=hint)


def _line(error: ForgeError) -> str:
    return " ".join(error.message.split())[:300]
