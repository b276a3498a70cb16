"""Opens the job of a run, asks its hosts for their devices, and places the services."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forge_rl.engines.devices import standing_for
from forge_rl.engines.host import HostInfo
from forge_rl.errors import ConfigError
from forge_rl.flags.user_code import send_modules
from forge_rl.models.resolve import resolve_model
from forge_rl.run.placement_flag import read_placement
from forge_rl.run.plan.host_checks import failed_hosts, judge_facts
from forge_rl.run.plan.placing import PlacedServices, place
from forge_rl.run.records.json_files import write_json
from forge_rl.run.run_config import RunConfig
from forge_rl.run.start.preparation import PreparedRun
from forge_rl.run.start.replacements import Replacements, replacing
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.host_facts import Clock, HostFacts
from forge_rl.runtime.job_flag import build_job
from forge_rl.runtime.job_protocol import Job, JobListener, ReplacingJob
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import Service
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.services.host_actor import HostActor, appears, ask_facts
from forge_rl.services.trainer_config import TrainerConfig
from forge_rl.system.tasks import task_group

C = TypeVar("C", bound=RunConfig)
Answer = tuple[HostInfo, HostFacts, Clock]
"""A host's devices, its facts, and the offset of its clock."""

_ASK_DEADLINE_S = 300.0
"""Timeout of a host's answers, including the start of a process there."""
_HINT = "repair it, or leave it out of --placement; python -m apps.doctor shows more"


@dataclass(frozen=True, kw_only=True)
class RunHosts:
    """The hosts of a run, with its services placed on them."""

    cluster: Cluster
    placed: PlacedServices
    without_model: tuple[str, ...] = ()
    """Hosts that do not see the model's folder, or not the run's."""
    replacements: Replacements
    """Hosts that the run asks for."""
    defaults: Mapping[str, Mapping[str, Any]]
    """Defaults on the controller of settings whose defaults depend on the kind of device, by field of the config."""

    def adapted(self, config: C) -> C:
        """Return the settings with the hosts' device-dependent defaults where they have the controller's."""
        if (host_defaults := device_defaults()) == self.defaults:
            return config
        # The settings were parsed before the hosts' devices were known. A value that the user named, or that differs
        # from the controller's default, was set by the user, and stays.
        parts, named = {}, config.named or ()
        for part, controller_defaults in self.defaults.items():
            if (settings := getattr(config, part, None)) is None:
                continue  # a recipe without a critic
            user_set = {
                name
                for name, value in controller_defaults.items()
                if f"{part}.{name}" in named or getattr(settings, name) != value
            }
            changes = {name: value for name, value in host_defaults[part].items() if name not in user_set}
            parts[part] = dataclasses.replace(settings, **changes)
        return dataclasses.replace(config, **parts)


def device_defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults of settings that depend on the kind of device, by field of the config."""
    row, generator = {"seq_len": TrainerConfig().seq_len}, GeneratorConfig()
    names = "max_num_seqs", "gpu_memory_utilization"
    return {"trainer": row, "critic": row, "generator": {name: getattr(generator, name) for name in names}}


def _tell_of_hosts(
    prepared: PreparedRun, cluster: Cluster, infos: Mapping[str, HostInfo], placed: PlacedServices
) -> None:
    log = prepared.monitor.log
    if far_hosts := [host for host in infos if not cluster.shares_files(host)]:
        send_modules()
        log.event(f"{', '.join(far_hosts)} do not see the run's folder: all files go through this process")
    prepared.monitor.display.startup("hosts", "ready", ", ".join(cluster.hosts[1:]))
    for line in placed.lines():
        log.event(line)
    write_hosts(prepared.folder, infos, placed.hosts)


@contextlib.asynccontextmanager
async def open_hosts(config: RunConfig, prepared: PreparedRun) -> AsyncIterator[RunHosts]:
    """Acquire the job's hosts while the body runs, and place the services on them.

    Raises:
        ConfigError: the job gives no hosts to this process, or the placement does not fit them.
        ForgeError: the job cannot start, or a host does not answer.
    """
    job, monitor = build_job(config.job), prepared.monitor
    if not isinstance(job, Job):
        raise ConfigError(f"--job {config.job} runs a whole command", hint="start the recipe by its command line")
    # The job may lose a host before there is a cluster, or later: both are noted, here first.
    lost_hosts: dict[str, str] = {}
    clusters: list[Cluster] = []
    placed: PlacedServices | None = None

    def lose(host: str, cause: str) -> None:
        lost_hosts[host] = cause
        monitor.log.warn(f"host {host} is gone: {cause}")
        for cluster in clusters:
            cluster.lose(host, cause)

    def say(text: str) -> None:
        if placed is None:
            monitor.display.startup("hosts", "starting", text)
        else:
            monitor.log.warn(text)

    logs = (prepared.folder / "logs").resolve()
    async with job.open(JobListener(say=say, on_lost=lose)) as hosts:
        defaults = device_defaults()
        cluster = Cluster(logs, hosts, may_be_public=config.isolation.public_ports)
        clusters.append(cluster)
        # Hosts that were lost between the job's start and the cluster's.
        for host, cause in lost_hosts.items():
            cluster.lose(host, cause)
        replacing_job = job if isinstance(job, ReplacingJob) else None
        # A process is started only on hosts other than this one, to ask for what they have.
        infos, without_model = {THIS_HOST: HostInfo.of_this_host()}, list[str]()
        if hosts:
            say(f"asking {', '.join(cluster.hosts[1:])}")
            progress = monitor.display.progress
            model = await asyncio.to_thread(resolve_model, config.model, config.cache, progress)
            answers, without_model = await ask_hosts(cluster, prepared, model.resolve(), cluster.hosts[1:])
            infos |= sound_hosts(config, cluster, answers, monitor.log.warn)
        placed = place(config, infos)
        if hosts:
            _tell_of_hosts(prepared, cluster, infos, placed)
        async with replacing(replacing_job, prepared.folder, cluster, monitor) as replacements:
            try:
                # From here on, checks and defaults ask about the hosts' devices in place of the controller's.
                with standing_for(placed.devices) if hosts else contextlib.nullcontext():
                    yield RunHosts(
                        cluster=cluster,
                        placed=placed,
                        replacements=replacements,
                        defaults=defaults,
                        without_model=tuple(host for host in without_model if host in infos),
                    )
            finally:
                await cluster.close()


def write_hosts(folder: Path, infos: Mapping[str, HostInfo], services: Mapping[str, Sequence[str]]) -> None:
    """Write hosts.json: what each host has, and the hosts of each service."""
    described = {name: dataclasses.asdict(info) for name, info in infos.items()}
    write_json(folder / "hosts.json", {"hosts": described, "services": dict(services)})


def sound_hosts(
    config: RunConfig, cluster: Cluster, answers: Mapping[str, Answer], warn: Callable[[str], None]
) -> dict[str, HostInfo]:
    """Return the devices of the hosts that pass the quick checks; warn about the others and leave them out.

    Raises:
        ForgeError: --placement names a host that fails, or all hosts of the job fail.
    """
    # The controller's host comes first, as the others are compared with it.
    facts = {THIS_HOST: HostFacts.of_this_host()} | {host: facts for host, (_, facts, _) in answers.items()}
    findings = judge_facts(facts, {host: clock for host, (_, _, clock) in answers.items()})
    failed = {
        host: ConfigError(f"host {host} fails the checks at the start: {cause}", hint=_HINT)
        for host, cause in failed_hosts(findings).items()
        if host != THIS_HOST
    }
    chosen_hosts = {name for names in read_placement(config.placement).hosts.values() for name in names}
    for host, error in failed.items():
        # Leaving out a host that the user named would change the placement that was asked for.
        if host in chosen_hosts or len(failed) == len(answers):
            raise error
        warn(f"{error.message}; the run goes on without it")
        cluster.lose(host, error.message)
    return {host: info for host, (info, _, _) in answers.items() if host not in failed}


async def ask_hosts(
    cluster: Cluster, prepared: PreparedRun, model: Path, hosts: Sequence[str]
) -> tuple[dict[str, Answer], list[str]]:
    """Ask each host for its devices; also return the hosts without the model, and note who sees the run's folder."""
    service = Service("host", cluster, prepared.monitor.faults, recoverable=True)
    # Each host answers with a file next to this one. The same path may exist there on another disk, so existence alone
    # would prove nothing.
    probe = prepared.folder.resolve() / f".probe-{secrets.token_hex(8)}"
    try:
        probe.write_text(probe.name)
        async with task_group() as group:
            tasks = {
                host: group.create_task(_ask_one(service, service.spawn(HostActor, host=host), probe, model))
                for host in hosts
            }
        answers = {host: task.result() for host, task in tasks.items()}
        cluster.sharing.update(host for host, (_, shares, _) in answers.items() if shares)
        without_model = [host for host, (_, shares, has_model) in answers.items() if not (shares and has_model)]
        return {host: answer for host, (answer, _, _) in answers.items()}, without_model
    finally:
        await service.stop()
        for path in probe.parent.glob(f"{probe.name}*"):
            path.unlink(missing_ok=True)


async def _ask_one(service: Service, replica: Replica, probe: Path, model: Path) -> tuple[Answer, bool, bool]:
    """Return a host's answer, whether it sees the run's folder, and whether it sees the model's."""
    await service.watch(replica, deadline_s=_ASK_DEADLINE_S)
    answer = probe.with_name(f"{probe.name}-{replica.index}")
    problem = await replica.call("answer_probe", probe, answer, deadline_s=_ASK_DEADLINE_S)
    # Both ways: the host reads a file of this machine, and this machine sees the one that it wrote.
    shares = not problem and await appears(answer, probe.name)
    missing = await replica.call("missing", (model,), deadline_s=_ASK_DEADLINE_S)
    info: HostInfo = await replica.call("info", deadline_s=_ASK_DEADLINE_S)
    return (info, *await ask_facts(replica, deadline_s=_ASK_DEADLINE_S)), shares, not missing
