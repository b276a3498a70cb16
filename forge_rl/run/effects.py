"""Flags that act only while another flag, their switch, is on, or on another device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from forge_rl.data.adaptive import Adapting
from forge_rl.data.curriculum import Curriculum
from forge_rl.engines.devices import device_type, hosts_devices
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.errors import ConfigError
from forge_rl.flags.fields import changes_of, names_in
from forge_rl.metrics.recorder import Recording
from forge_rl.rollout.evaluation import EvalConfig
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.runtime.job_flag import build_job
from forge_rl.runtime.job_protocol import ReplacingJob
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.services.weight_store_config import WeightStoreConfig


class SwitchedRun(Protocol):
    """Settings of a run that switch others on, as in `RunConfig`."""

    @property
    def mixture(self) -> Adapting: ...
    @property
    def curriculum(self) -> Curriculum: ...
    @property
    def schedule(self) -> ScheduleConfig: ...
    @property
    def lora(self) -> LoRAConfig: ...
    @property
    def generator(self) -> GeneratorConfig: ...
    @property
    def evaluation(self) -> EvalConfig: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def weights(self) -> WeightStoreConfig: ...
    @property
    def recording(self) -> Recording: ...
    @property
    def job(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A setting without which flags have no effect."""

    flags: tuple[str, ...]
    """Fields that need it, or groups of them, by their paths, such as "lora.alpha" or "mixture"."""
    is_on: Callable[[SwitchedRun], object]
    """Returns a true value if the flags act."""
    why: str
    """Why the flags do not act otherwise."""
    hint: str
    """What turns it on."""


SWITCHES: Mapping[str, Switch] = {
    "--mixture.adapt": Switch(
        flags=("mixture",),
        is_on=lambda config: config.mixture.adapt != "off",
        why="--mixture.adapt is off",
        hint="add --mixture.adapt success",
    ),
    "--curriculum.pools": Switch(
        flags=("curriculum",),
        is_on=lambda config: config.curriculum.pools != "off",
        why="--curriculum.pools is off",
        hint="add --curriculum.pools solve_rate",
    ),
    "--schedule.dynamic-sampling": Switch(
        flags=("schedule.max_replaced",),
        is_on=lambda config: config.schedule.dynamic_sampling,
        why="no group is replaced by its rewards",
        hint="add --schedule.dynamic-sampling",
    ),
    "--lora.rank": Switch(
        flags=("lora", "generator.adapters"),
        is_on=lambda config: config.lora.rank,
        why="--lora.rank 0 trains all weights, without adapters",
        hint="add --lora.rank 16",
    ),
    "--generator.max-loras": Switch(
        flags=("generator.max_lora_rank",),
        is_on=lambda config: config.generator.max_loras or config.lora.rank,
        why="engines have no room for adapters",
        hint="set --generator.max-loras above 0",
    ),
    "engines on GPUs": Switch(
        flags=("generator.gpu_memory_utilization", "generator.enforce_eager"),
        is_on=lambda config: device_type() != "cpu" or not knows_devices(config.job),
        why="engines would run on CPU",
        hint="run it on GPUs",
    ),
    "--evaluation.every": Switch(
        flags=("evaluation",),
        # Without tasks, the next switch names the cause.
        is_on=lambda config: config.evaluation.every or not config.evaluation.tasks,
        why="--evaluation.every 0 evaluates nothing",
        hint="set --evaluation.every above 0",
    ),
    "--evaluation.tasks": Switch(
        flags=tuple(
            f"evaluation.{name}"
            for name in ("episodes", "temperature", "max_tokens", "success", "blocking", "keep_best")
        ),
        is_on=lambda config: config.evaluation.tasks,
        why="--evaluation.tasks 0 evaluates nothing",
        hint="set --evaluation.tasks above 0",
    ),
    "--evaluation.episodes": Switch(
        flags=("evaluation.success",),
        is_on=lambda config: config.evaluation.episodes > 1,
        why="pass@k takes several episodes of a task",
        hint="set --evaluation.episodes above 1",
    ),
    "--checkpoint-every": Switch(
        flags=("checkpoint_mirror", "keep_checkpoints", "evaluation.keep_best"),
        is_on=lambda config: config.checkpoint_every,
        why="--checkpoint-every 0 writes no checkpoints",
        hint="set --checkpoint-every above 0",
    ),
    "--weights.mirror": Switch(
        flags=("weights.mirror_full_every",),
        is_on=lambda config: config.weights.mirror,
        why="no --weights.mirror is set",
        hint="add --weights.mirror",
    ),
    "--weights.transport": Switch(
        flags=("weights.shm",),
        is_on=lambda config: config.weights.transport != "torchstore",
        why="--weights.transport torchstore has no such folder",
        hint="set --weights.transport shared_memory",
    ),
    "--recording.share": Switch(
        flags=("recording.gib",),
        is_on=lambda config: config.recording.share,
        why="--recording.share 0 keeps no episodes",
        hint="set --recording.share above 0",
    ),
    "--job": Switch(
        flags=tuple(
            f"{service}.{bound}"
            for service in ("generator", "environment")
            for bound in ("min_replicas", "max_replicas")
        ),
        is_on=lambda config: config.job != "local",
        why="--job local is one host, and none joins or leaves",
        hint="name a --job of several hosts",
    ),
    "--job most_replaced": Switch(
        flags=("trainer.wait_for_host_s", "critic.wait_for_host_s"),
        is_on=lambda config: isinstance(job := build_job(config.job), ReplacingJob) and job.most_replaced,
        why="no host comes in the place of one that died",
        hint="give --job an option most_replaced, such as --job slurm:nodes=2,most_replaced=1",
    ),
}
"""Switches by their own flags. A switch never needs itself, even if it belongs to a group that does."""


def knows_devices(job: str) -> bool:
    """Return whether `device_type` is the kind of device of a run's services.

    Hosts of a job may have GPUs where this machine, such as a login node, has none, and are asked once they are there.
    """
    return hosts_devices() is not None or job.partition(":")[0] in ("local", "process")


def check_switches(config: SwitchedRun) -> None:
    """Refuse flags whose switch is off.

    Raises:
        ConfigError: names the first of them, and the switch.
    """
    changes = changes_of(config)
    for switch, needed in SWITCHES.items():
        # A switch may be in a group that it governs, such as --mixture.adapt, and needs no switch itself.
        idle = [name for name in names_in(changes, needed.flags) if name != switch]
        if idle and not needed.is_on(config):
            hint = f"{needed.hint}, or leave out {idle[0]}"
            raise ConfigError(f"{idle[0]} has no effect, as {needed.why}", hint=hint)
