"""The settings that every recipe shares."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from forge_rl.data.adaptive import Adapting
from forge_rl.data.curriculum import Curriculum
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.errors import ConfigError, check_flags
from forge_rl.flags.categories import OfCommand, Operational, Tunable
from forge_rl.flags.fields import changed_flags
from forge_rl.flags.given import given_flags
from forge_rl.metrics.alerts import Alerts
from forge_rl.metrics.recorder import Recording
from forge_rl.models.bundled import default_cache
from forge_rl.rollout.evaluation import EvalConfig
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.effects import check_switches, knows_devices
from forge_rl.run.endpoints import address_of, check_reachable
from forge_rl.run.lora_settings import with_lora, with_served_versions
from forge_rl.run.placement_flag import read_placement
from forge_rl.run.target import TargetConfig
from forge_rl.runtime.isolation import Isolation
from forge_rl.runtime.job_flag import build_job
from forge_rl.runtime.job_protocol import ReplacingJob
from forge_rl.services.environment import Environment
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.services.reward import RewardService
from forge_rl.services.trainer_config import CriticConfig, TrainerConfig
from forge_rl.services.weight_store_config import WeightStoreConfig
from forge_rl.tokens.template_args import TemplateArgTexts, read_template_args


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings that every recipe shares; a recipe adds its method's own.

    @dataclass(frozen=True, kw_only=True)
    class Config(RunConfig):
        loss: LossTexts = ("clipped",)
    """

    USED: ClassVar[tuple[str, ...]] = (
        *("model", "steps", "groups_per_batch", "group_size", "seed", "checkpoint_every", "out", "plan", "display"),
        *("job", "schedule.kind", "schedule.max_lag", "evaluation.every", "evaluation.tasks"),
        *("trainer.ranks", "trainer.minibatches", "trainer.seq_len", "trainer.optimizer.lr"),
        *("generator.replicas", "generator.max_tokens", "generator.max_model_len", "generator.temperature"),
    )
    """Flags that `--help` lists, next to the recipe's own."""
    UNUSED: ClassVar[tuple[str, ...]] = ()
    """Fields that the recipe ignores: `--help` and config files leave them out, and they must keep their defaults."""
    UNSCALED: ClassVar[tuple[str, ...]] = ()
    """Flags whose defaults do not follow the model and the device, such as those that the recipe reads before a start;
    see `run.plan.scaled`."""
    LR_POWER: ClassVar[float] = 1.0
    """Power of the model's number of weights by which the default learning rate falls: 1, or 0.5 for supervised
    training."""
    model: str = "smollm2-135m"
    """Name of a bundled model, Hugging Face id with or without @revision, or folder of a model or a checkpoint."""
    steps: Tunable[int] = 10
    """Number of batches to train on; each takes minibatches x epochs optimizer steps, by default one."""
    groups_per_batch: int = 8
    """P: tasks per batch."""
    group_size: int = 8
    """G: episodes per task, the group over which advantages are centered. 1 requires --advantages reinforce."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    mixture: Adapting = field(default_factory=Adapting)
    curriculum: Curriculum = field(default_factory=Curriculum)
    placement: Operational[str] = "auto"
    """colocated: trainer and engines share devices; engines sleep while the trainer trains, and its state is offloaded
    while they decode. separate: each has its own devices. auto: colocated if there are too few GPUs, or if trainer and
    engines take turns and both fit; separate on CPU, where memory is shared anyway. Hosts of a --job follow after
    semicolons, as trainer=HOST+HOST;generator=HOST;environment=HOST;reward=HOST;teachers=HOST, or are in a TOML file
    with these keys, named here. By default trainer and engines have all hosts, or all with GPUs."""
    job: OfCommand[str] = "local"
    """Source of the run's hosts, as KIND[:KEY=VALUE,...]: local, process:N, allocation, slurm:nodes=N or
    kubernetes:image=NAME. local is this machine alone; process:N are N hosts simulated by processes of this machine;
    slurm is a batch job that runs this whole command; allocation the nodes that the command is in; kubernetes pods. A
    config file may have a table [job] instead, with its kind and options."""
    dry_run: OfCommand[bool] = False
    """Print what --job would start, such as a batch script, and exit."""
    seed: int = 0
    """Seed of task order and sampling."""
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    recording: Recording = field(default_factory=Recording)
    checkpoint_every: Operational[int] = 10
    """Steps between checkpoints; the last step also writes one. 0 writes none."""
    keep_checkpoints: Operational[int] = 2
    """Number of newest checkpoints to keep."""
    checkpoint_mirror: Operational[str] = ""
    """Address to which each checkpoint is copied, such as s3://bucket/run, in any of fsspec's file systems. A run whose
    folder is lost, damaged or older resumes from there. Only one run may write to it; it has no logs or episodes."""
    out: OfCommand[Path | None] = None
    """Run folder; by default one under runs/, named after the settings. The same command resumes a stopped run."""
    force_continue: OfCommand[bool] = False
    """Resume the run in the folder although settings or code that define it have changed."""
    plan: OfCommand[bool] = False
    """Print the memory that each part of the run needs and exit, with status 0 if it fits on this machine, else 1. The
    trainer's step is traced on meta tensors; nothing is loaded or started. --on plans for other machines."""
    target: Annotated[TargetConfig, tyro.conf.OmitArgPrefixes] = field(default_factory=TargetConfig)
    cache: OfCommand[Path] = field(default_factory=default_cache)
    """Folder into which the bundled model is unpacked, once."""
    display: OfCommand[Literal["auto", "live", "plain", "none"]] = "auto"
    """Output: a live panel, plain lines, nothing, or auto to suit the terminal."""
    wandb: OfCommand[str] = ""
    """Weights & Biases project to also log to; requires the extra forge_rl[wandb]."""
    prometheus: OfCommand[str] = ""
    """Serve the run's metrics in Prometheus' text format at a PORT of this machine, or at HOST:PORT. They include no
    texts of tasks and answers."""
    attach_on: OfCommand[str] = ""
    """Let `forge_rl.attach` work on other machines that see the run folder, at a PORT or HOST:PORT of the controller's
    machine; port 0 picks a free one. Requests and replies are authenticated by a key in the folder, not encrypted."""
    alerts: Alerts = field(default_factory=Alerts)
    parse_control_tokens: bool = False
    """Encode text in messages and tools that looks like a control token, such as <|im_end|>, as that token. By default
    it stays text; otherwise the author of a tool's output could end the turn and write the next one as the system."""
    template_args: TemplateArgTexts = ()
    tool_parser: str = ""
    """Name of vLLM's parser of the model's tool calls; by default the one that reads back the calls that its chat
    template writes. Agents' requests are parsed by it too."""
    phase_deadline_s: Operational[float] = 3600.0
    """Timeout of one phase; the run then stops and names the cause of the wait."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weights: WeightStoreConfig = field(default_factory=WeightStoreConfig)
    reward: RewardService.Config = field(default_factory=RewardService.Config)
    environment: Environment.Config = field(default_factory=Environment.Config)
    isolation: Annotated[Isolation, tyro.conf.OmitArgPrefixes] = field(default_factory=Isolation)
    named: Annotated[tuple[str, ...] | None, tyro.conf.Fixed, tyro.conf.Suppress] = field(
        default=None, repr=False, compare=False
    )
    """Flags that the command line or a config file set, such as trainer.optimizer.lr; None in a config made by code."""

    @property
    def starts_engines(self) -> bool:
        """Whether the recipe generates episodes, which takes engines."""
        return True

    @property
    def policy_steps(self) -> int:
        """Number of steps that train the policy, over which its learning rate decays: all, unless a recipe begins with
        others."""
        return self.steps

    def __post_init__(self) -> None:
        # Interactive sessions may pass strings, and no shell expands the ~ of a config file or of --out=~/run.
        object.__setattr__(self, "cache", Path(os.path.expanduser(self.cache)))
        if self.out is not None:
            object.__setattr__(self, "out", Path(os.path.expanduser(self.out)))
        # Set only while flags or a file are parsed. A copy made by `replace` keeps what its original had.
        if (flags := given_flags()) is not None:
            object.__setattr__(self, "named", flags)
        job = build_job(self.job)
        if isinstance(job, ReplacingJob) and job.most_replaced and self.isolation.private_network:
            raise ConfigError(
                "--job has most_replaced, and no host can join a run in a private network",
                hint="leave out one of most_replaced and --private-network",
            )
        # Called for its errors alone, as malformed arguments would otherwise only show once the tokenizer loads.
        read_template_args(self.template_args)
        devices = read_placement(self.placement).devices
        # Both may be applied repeatedly without a further change, since each `replace` of the config runs them again.
        object.__setattr__(self, "trainer", with_lora(self))
        object.__setattr__(self, "generator", with_served_versions(self))
        # The trainer can only repeat the experts that engines report.
        if self.trainer.router_replay:
            object.__setattr__(self, "generator", replace(self.generator, routed_experts=True))
        if self.prometheus:
            address_of(self.prometheus)
        if self.attach_on:
            check_reachable(self.attach_on, "--attach-on", may_be_public=self.isolation.public_ports)
        if self.alerts.webhook_url and self.isolation.private_network:
            raise ConfigError(
                "--alerts.webhook-url needs the network, which --private-network keeps from the run",
                hint="set --alerts.command, whose command may write a file that something outside watches",
            )
        if self.target.on and not self.plan:
            raise ConfigError(f"--on {self.target.on} is of a plan", hint="add --plan, or leave out --on")
        counts = {"steps": 1, "groups_per_batch": 1, "group_size": 1}
        check_flags(self, "--", minimum=counts | {"checkpoint_every": 0, "keep_checkpoints": 1, "phase_deadline_s": 1})
        if self.group_size == 1 and self.schedule.dynamic_sampling:
            raise ConfigError(
                "--schedule.dynamic-sampling replaces groups of equal rewards, which all are with --group-size 1",
                hint="leave it out, or raise --group-size",
            )
        if devices == "colocated" and self.schedule.decodes_while_training:
            raise ConfigError(
                f"engines decode during training under the schedule {self.schedule.kind}, but --placement is colocated",
                hint="choose --placement separate, or --schedule.kind pipelined",
            )
        if self.generator.guests and not (self.starts_engines and self.schedule.decodes_while_training):
            raise ConfigError(
                f"--generator.guests decode only while engines and trainer both work, and under the schedule "
                f"{self.schedule.kind} they take turns"
                if self.starts_engines
                else "--generator.guests are engines, and the run has none",
                hint="leave it out; --placement colocated has engines on the trainer's devices",
            )
        if self.generator.hosts_per_replica > 1 and self.weights.transport == "torchstore":
            raise ConfigError(
                "engines of several hosts read weights from shared memory, and --weights.transport is torchstore",
                hint="leave out --weights.transport or --generator.hosts-per-replica",
            )
        self._check_sizes()

    def check_effects(self) -> None:
        """Refuse settings that other settings or, once they are known, the run's devices rule out.

        Called before a run starts, and not when a config is made, as a start may fill in settings that stay unused;
        again when the hosts of a job are known.

        Raises:
            ConfigError: names the flags.
        """
        if unused := changed_flags(self, self.UNUSED):
            raise ConfigError(f"this recipe does not use {unused[0]}", hint="leave it out")
        check_switches(self)
        if knows_devices(self.job):
            self.check_devices()
        schedule = self.schedule
        if schedule.max_lag != schedule.lag and changed_flags(self, ("schedule.max_lag",)):
            raise ConfigError(
                f"--schedule.max-lag is {schedule.max_lag}, but with --schedule.kind {schedule.kind} the lag is "
                f"{schedule.lag}",
                hint="leave out --schedule.max-lag, or choose --schedule.kind pipelined or asynchronous",
            )

    def check_devices(self) -> None:
        """Refuse settings that the kind of device rules out on which services run.

        Raises:
            ConfigError: names the flags.
        """
        self.trainer.check_devices()
        if isinstance(critic := getattr(self, "critic", None), CriticConfig):
            critic.check_devices()
        if self.starts_engines and 0 < self.trainer.longest_row < self.generator.max_model_len:
            needed = -(-self.generator.max_model_len // self.trainer.seq_len)
            raise ConfigError(
                f"episodes can have {self.generator.max_model_len} tokens, but a row of the trainer only "
                f"{self.trainer.longest_row}",
                hint=f"raise --trainer.seq-len, set --trainer.context-parallel-degree to {needed} or more to split "
                "each row over as many ranks, or lower --generator.max-model-len",
            )

    def _check_sizes(self) -> None:
        """Refuse lengths and numbers that contradict each other.

        Raises:
            ConfigError: names the flags.
        """
        updates = self.policy_steps * self.trainer.updates_per_batch
        if self.trainer.optimizer.warmup_updates > updates:
            raise ConfigError(
                f"the warm-up of {self.trainer.optimizer.warmup_updates} updates is longer than the run of {updates}",
                hint="lower --trainer.optimizer.warmup-updates",
            )
        if (self.evaluation.max_tokens or 0) >= self.generator.max_model_len:
            raise ConfigError(
                f"--evaluation.max-tokens is {self.evaluation.max_tokens}, but prompt and completion together "
                f"are limited to {self.generator.max_model_len}",
                hint="lower --evaluation.max-tokens, or raise --generator.max-model-len",
            )
        if self.trainer.minibatches > self.groups_per_batch:
            raise ConfigError(
                f"{self.groups_per_batch} groups cannot be split into {self.trainer.minibatches} minibatches",
                hint="lower --trainer.minibatches, or raise --groups-per-batch",
            )
