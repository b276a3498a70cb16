"""Settings of the trainer service."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge_rl.engines.degrees import check_ranks, least_ranks
from forge_rl.engines.platform import device_type
from forge_rl.engines.protocol import TrainSettings
from forge_rl.errors import ConfigError, check_flags

PAD_MULTIPLE = 128
"""Tokens that a row on a GPU has a multiple of: FlexAttention works in such blocks. The CPU's takes any length."""
LEAST_ROW = 256
"""Fewest tokens of a row on a GPU, padding included: those of one block would be compiled for alone."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(TrainSettings):
    """Settings of the trainer: its processes, its rows, its optimizer."""

    ranks: int = 1
    """Processes that share the policy by FSDP2: one for each GPU, or some on a CPU. 1 is raised to what the
    parallel flags need; beyond that, more ranks shard the policy further and train more rows at a time."""
    row_tokens: int = field(default_factory=lambda: 0 if device_type() == "cuda" else 1024)
    """Most tokens of a packed row that one device holds; a row is one microbatch, and no episode is longer. 0, the
    default on CUDA, has a run choose by the GPU's memory and the model; on a CPU it is 1,024."""
    minibatches: int = 1
    """Parts that a batch is cut into, each for an update of its own."""
    epochs: int = 1
    """Times that a batch is trained on before the next one, each time cut into other minibatches."""
    max_skipped_updates: int = 3
    """Updates in a row whose gradient is not finite that end the run; fewer are skipped, and saved to look at."""
    port: int = 0
    """Port at which the ranks meet; 0 finds a free one."""
    max_restarts: int = 3
    """Most restarts from the last checkpoint in one sitting of the run, each because a rank died or hung; after
    that, or at 0, such a death ends the run."""
    deadline_s: float = 1800.0
    """Longest time for one call of the ranks, such as a step; past it they count as hung, and start again. Once a
    call of its kind was measured, 20 times the slowest one's time for as many tokens, or 5 minutes, is enough."""

    def __post_init__(self) -> None:
        check_flags(
            self,
            "--trainer.",
            least={"ranks": 1, "minibatches": 1, "epochs": 1, "max_skipped_updates": 1}
            | {"tensor_parallel": 1, "context_parallel": 1, "expert_parallel": 1, "replicate": 1}
            | {"port": 0, "max_restarts": 0, "row_tokens": int(device_type() == "cpu")},
            above={"deadline_s": 0},
            below={"port": 65536},
        )
        if self.dtype == "float64" and device_type() == "cuda":
            raise ConfigError(
                "attention has no float64 on a GPU",
                hint="set --trainer.dtype to bfloat16 or float32, or train on a CPU",
            )
        if self.cpu_offload and device_type() == "cpu":
            raise ConfigError(
                "weights and optimizer state are in host memory already, where the ranks are on a CPU",
                hint="leave out --trainer.cpu-offload",
            )
        fits = self.row_tokens % PAD_MULTIPLE == 0 and self.row_tokens >= LEAST_ROW
        if device_type() == "cuda" and self.row_tokens and not fits:
            raise ConfigError(
                f"a row of {self.row_tokens} tokens cannot be packed",
                hint=f"set --trainer.row-tokens to a multiple of {PAD_MULTIPLE}, from {LEAST_ROW}",
            )
        if self.ranks == 1:
            object.__setattr__(self, "ranks", least_ranks(self))
        check_ranks(self, self.ranks)

    @property
    def shares(self) -> int:
        """Number of data-parallel shares of a batch: runs of `peers` neighbouring ranks train one each."""
        return self.ranks // self.peers

    @property
    def updates_per_batch(self) -> int:
        """Number of optimizer steps that a batch takes, if every minibatch gives one."""
        return self.minibatches * self.epochs
