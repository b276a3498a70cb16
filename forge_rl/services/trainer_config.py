"""Settings of the trainer service."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from forge_rl.engines.degrees import check_ranks, least_ranks
from forge_rl.engines.devices import device_type
from forge_rl.engines.protocol import TrainSettings
from forge_rl.errors import ConfigError, check_flags
from forge_rl.flags.categories import Operational, Tunable

PAD_MULTIPLE = 128
"""Row lengths on a GPU are multiples of this, FlexAttention's block size. Attention on CPU takes any length."""
LEAST_ROW = 256
"""Minimum tokens of a row on a GPU, including padding; rows of a single block would be compiled separately."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(TrainSettings):
    """Settings of the trainer: its processes, its rows, its optimizer."""

    ranks: Operational[int] = 1
    """Processes that shard the policy with FSDP2: one per GPU, or several on one CPU. 1 is raised to the number that
    the parallel flags require; more ranks shard the policy further and train more rows at a time."""
    seq_len: int = field(default_factory=lambda: 0 if device_type() == "cuda" else 1024)
    """Maximum tokens of a packed row per device; a row is one microbatch and must hold the longest episode. 0, the
    default on CUDA, chooses by GPU memory and model; the default on CPU is 1,024."""
    minibatches: Tunable[int] = 1
    """Number of minibatches that a batch is split into, with one update each."""
    epochs: Tunable[int] = 1
    """Number of passes over each batch, each with a new split into minibatches."""
    max_skipped_updates: Operational[int] = 3
    """End the run after this many consecutive updates with a non-finite gradient; fewer are skipped, and saved for
    inspection."""
    port: Operational[int] = 0
    """Rendezvous port of the ranks; 0 picks a free one."""
    max_restarts: Operational[int] = 3
    """Maximum restarts from the last checkpoint per launch of the run, after a rank died or hung; then, or at 0, such a
    death ends the run."""
    wait_for_host_s: Operational[float] = 1800.0
    """Longest wait for a host that the run has asked for (--job ...:most_replaced=N) in the place of one that died, if
    the ranks do not fit on the others; after it, or at 0, the run ends. Within --phase-deadline-s."""
    deadline_s: Operational[float] = 1800.0
    """Timeout of one call to the ranks, such as a step; the ranks then count as hung and are restarted. Once a call of
    its kind was measured, the timeout is 20 times the slowest call's time for as many tokens, but at least 5 minutes,
    if that is less."""

    def __post_init__(self) -> None:
        check_flags(
            self,
            "--trainer.",
            minimum={"ranks": 1, "minibatches": 1, "epochs": 1, "max_skipped_updates": 1}
            | dict.fromkeys(self.degrees, 1)
            | {"port": 0, "max_restarts": 0, "seq_len": 0, "wait_for_host_s": 0},
            above={"deadline_s": 0},
            below={"port": 65536},
        )
        self.optimizer.check("--trainer.optimizer.")
        if self.dtype == "float64" and self.optimizer_state != "float32":
            raise ConfigError(
                f"training in float64 has float64 moments, not {self.optimizer_state}",
                hint="leave out --trainer.optimizer-state, or set another --trainer.dtype",
            )
        if self.enable_activation_offload and self.activation_checkpointing != "full":
            raise ConfigError(
                "only each layer's input can be offloaded, and --trainer.activation-checkpointing "
                f"{self.activation_checkpointing} keeps more",
                hint="set --trainer.activation-checkpointing full, or leave out --trainer.enable-activation-offload",
            )
        # The default: as many ranks as the parallel degrees need.
        if self.ranks == 1:
            object.__setattr__(self, "ranks", least_ranks(self))
        check_ranks(self, self.ranks)

    def check_devices(self) -> None:
        """Refuse settings that the ranks' kind of device rules out, once `device_type` tells it.

        Raises:
            ConfigError: names the flag.
        """
        if device_type() == "cuda":
            if self.dtype == "float64":
                raise ConfigError(
                    "attention has no float64 on a GPU",
                    hint="set --trainer.dtype to bfloat16 or float32, or train on a CPU",
                )
            # FlexAttention computes a GPU's rows in whole blocks.
            if self.seq_len and (self.seq_len % PAD_MULTIPLE or self.seq_len < LEAST_ROW):
                raise ConfigError(
                    f"a row of {self.seq_len} tokens cannot be packed",
                    hint=f"set --trainer.seq-len to a multiple of {PAD_MULTIPLE}, from {LEAST_ROW}",
                )
            return
        if not self.seq_len:
            raise ConfigError(
                "--trainer.seq-len is 0, which chooses by a GPU's memory, and the ranks are on a CPU",
                hint="set --trainer.seq-len to 1 or more",
            )
        for flag, is_set, reason in (
            (
                "--trainer.enable-cpu-offload",
                self.enable_cpu_offload,
                "weights and optimizer state are in host memory already",
            ),
            ("--trainer.stays-on-device", self.stays_on_device, "their state is moved nowhere while engines decode"),
            (
                "--trainer.enable-activation-offload",
                self.enable_activation_offload,
                "activations are in host memory already",
            ),
        ):
            if is_set:
                raise ConfigError(f"the ranks are on a CPU, so {reason}", hint=f"leave out {flag}")

    @property
    def shares(self) -> int:
        """Number of data-parallel shares of a batch; in each pipeline stage, `peers` neighbouring ranks train one."""
        return self.ranks // (self.peers * self.pipeline_parallel_degree)

    def share(self, rank: int) -> int:
        """Return the index of the share that a rank trains."""
        return self.share_of(rank, self.ranks)

    @property
    def head_ranks(self) -> range:
        """Each share's first rank with the output head; see `TrainSettings.heads`."""
        return self.heads(self.ranks)

    @property
    def updates_per_batch(self) -> int:
        """Number of optimizer steps per batch, if no minibatch is empty."""
        return self.minibatches * self.epochs


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model that a trainer starts from."""

    folder: Path
    """Hugging Face folder of the initial model, which is also the frozen reference, if any."""
    reference: bool = False
    """Whether the ranks keep a frozen reference."""
    values: bool = False
    """Train a value model in place of a policy; see `make_train_engine`."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The run that a trainer takes its steps for."""

    seed: int
    """Determines the split of groups into minibatches; see `Layout.seed`."""
    total_steps: int
    """Batches of the run, for the learning rate schedule."""
    skipped: Path
    """Folder for the rows of skipped updates; created when needed."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig(TrainerConfig):
    """Settings of a critic: a value model in a trainer service of its own.

    It shares the trainer's GPUs.
    """

    model: str = ""
    """Hugging Face id or folder of the value model to start from: a policy's, whose value head then starts at 0,
    or one with a head of one output, such as a critic's checkpoint or a reward model. By default --model. Its tokens
    must be the policy's."""

    def __post_init__(self) -> None:
        with as_critic():
            super().__post_init__()
        if self.router_replay:
            raise ConfigError(
                "--critic.router-replay repeats the experts that engines chose with the policy, and a critic has its "
                "own router",
                hint="leave it out; --trainer.router-replay is of the policy",
            )

    def check_devices(self) -> None:
        with as_critic():
            super().check_devices()


@contextlib.contextmanager
def as_critic() -> Iterator[None]:
    """Have errors of a critic's settings name its flags."""
    try:
        yield
    except ConfigError as error:
        message, hint = (text.replace("--trainer.", "--critic.") for text in (error.message, error.hint))
        raise ConfigError(message, hint=hint) from None
