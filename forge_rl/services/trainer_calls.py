"""The calls to all ranks of a trainer, with the types of their replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.errors import ForgeError
from forge_rl.metrics import Value
from forge_rl.weights.manifest import ShardReport

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class LoadedPolicy:
    """A policy that the ranks have loaded."""

    version: int
    updates: int
    """Number of optimizer steps that its weights have taken."""
    parameters: int
    failed_kernels: Mapping[str, str] = field(default_factory=dict)
    """Why GPU kernels are off on the first rank, by kernel; see `system.kernels`."""


@dataclass(frozen=True, kw_only=True)
class StepReply:
    """One rank's reply to a step."""

    metrics: list[dict[str, Value] | None]
    """Metrics of each update; see `StepResult`."""
    updates: int
    """Number of optimizer steps that the weights have taken."""
    seconds: float
    """Duration of the step."""
    scores: list[npt.NDArray[np.uint16]]
    """`rounded_scores` of the rows of the scored minibatches, from the first rank of a share with the output head."""


@dataclass(frozen=True, kw_only=True)
class PublishReply:
    """One rank's reply to a publish."""

    reports: list[ShardReport]
    """The shards that it wrote."""
    merged: list[ShardReport]
    """Its slices of the weights that have adapters, with these added, as engines must hold them."""
    seconds: Mapping[str, float]
    """Duration of each part: gathering shards from other memory or hosts, writing, and fingerprints of weights with
    adapters."""


@dataclass(frozen=True, kw_only=True)
class AdapterReply:
    """One rank's reply to a pass or a step of an adapter."""

    metrics: dict[str, Value]
    updates: int
    """Number of the adapter's optimizer steps."""
    seconds: float
    """Duration of the call."""
    logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)
    """After a pass, the logprobs of each row's targets; sent by the first rank of a share."""
    error: ForgeError | None = None
    """Error of this adapter's pass among several."""


@dataclass(frozen=True)
class RankCall(Generic[R]):
    """An endpoint of `TrainerActor` that is called on all ranks, and the type of each rank's reply."""

    method: str
    reply: type[R]


STEP = RankCall("step", StepReply)
EVALUATE = RankCall("evaluate", dict[str, Value])
LOGPROBS = RankCall("logprobs", list[torch.Tensor])
VALUES = RankCall("values", list[torch.Tensor])
LAYER_NOISE = RankCall("layer_noise", list[tuple[float, int]])
PUBLISH = RankCall("publish", PublishReply)
OFFLOAD = RankCall("offload", int)
ONLOAD = RankCall("onload", int)
WAIT_IDLE = RankCall("wait_idle", int)
RESET = RankCall("reset", NoneType)
SAVE = RankCall("save", NoneType)
OPEN_ADAPTER = RankCall("open_adapter", NoneType)
DROP_ADAPTER = RankCall("drop_adapter", NoneType)
RUN_ADAPTER = RankCall("run_adapter", AdapterReply)
RUN_ADAPTERS = RankCall("run_adapters", list[AdapterReply])
STEP_ADAPTER = RankCall("step_adapter", AdapterReply)
SAVE_ADAPTER = RankCall("save_adapter", NoneType)
LOAD_ADAPTER = RankCall("load_adapter", int)
