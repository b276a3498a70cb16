"""A loss of a user's own: tried before anything starts, its line named, its trace kept."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.correction import Correction
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.algorithms.user_loss import call_loss, try_loss
from forge_rl.errors import LossError
from forge_rl.flags.user_code import load
from forge_rl.run.plan.memory import show_plan
from recipes import grpo

BAD = """from forge_rl import ClippedSurrogate


def ratio(inputs):
    return inputs.logprobs / inputs.no_such_field


class Bad(ClippedSurrogate):
    def __call__(self, inputs):
        return ratio(inputs).sum(), {}
"""


@dataclass
class Custom(Loss):
    """What a user's loss may be."""

    body: Callable[[LossInputs], Any]
    aggregation: Aggregation = field(default_factory=Aggregation)

    def __call__(self, inputs: LossInputs) -> Any:
        return self.body(inputs)


class Sparing(Custom):
    """One that says that it can do without groups of equal rewards."""

    keeps_uniform = False


class Held(Loss):
    """What cannot be sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def take(self, inputs: LossInputs) -> Any:
        return inputs.logprobs.sum(), {}


@pytest.mark.parametrize(
    "loss",
    [
        ClippedSurrogate(),
        ClippedSurrogate(
            correction=Correction.presets["decoupled"], kl_coef=0.1, aggregation=Aggregation(kind="sequence_mean")
        ),
        ClippedSurrogate(kl_coef=0.1, kl_kind="k3"),
        Custom(lambda inputs: (torch.where(inputs.mask, -inputs.logprobs * inputs.advantages, 0.0).sum(), {"one": 1})),
        Sparing(lambda inputs: (torch.where(inputs.mask, -inputs.logprobs * inputs.advantages, 0.0).sum(), {})),
    ],
)
def test_a_loss_that_works_passes(loss: Any):
    try_loss(loss)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda inputs: inputs.logprobs.sum(), "the loss returned Tensor"),
        (lambda inputs: (inputs.logprobs, {}), r"the loss returned a tensor of shape \[8\]"),
        (lambda inputs: (inputs.logprobs.sum(), {"a": inputs.logprobs}), "the loss returned a sum 'a' of 8 values"),
        (lambda inputs: (inputs.logprobs.detach().sum(), {}), "has no gradient"),
        (lambda inputs: ((inputs.logprobs / 0).sum(), {}), "has a gradient that is not finite"),
        (lambda inputs: 1 / 0, r"the loss raised ZeroDivisionError: division by zero \(.*test_user_loss.py:\d+\)"),
        (Held().take, "cannot be sent to the trainer's ranks"),
    ],
)
def test_a_loss_that_cannot_work_says_why(body: Callable[[LossInputs], Any], message: str):
    with pytest.raises(LossError, match=message) as caught:
        try_loss(Custom(body))
    assert caught.value.hint


def test_a_loss_that_says_it_can_spare_what_has_a_gradient_is_refused():
    supervised = Sparing(lambda inputs: (torch.where(inputs.mask, -inputs.logprobs, 0.0).sum(), {}))
    assert Custom(supervised.body).keeps_uniform, "nothing is spared unless a loss says so"
    with pytest.raises(LossError, match="advantage of 0 has a gradient, though its keeps_uniform is False"):
        try_loss(supervised)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled cuda error"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_a_failure_of_the_device_within_a_loss_is_not_the_losss(error: Exception):
    def body(inputs: LossInputs) -> Any:
        raise error

    # Through call_loss itself: the trainer starts its ranks again after what is no ForgeError.
    with pytest.raises(type(error)) as caught:
        call_loss(Custom(body), None)  # type: ignore[arg-type]
    assert caught.value is error
    with pytest.raises(LossError, match="the loss raised RuntimeError: inconsistent tensor size"):
        call_loss(Custom(lambda _: torch.zeros(2) @ torch.zeros(3)), None)  # type: ignore[arg-type]


def test_the_plan_names_the_line_of_a_users_loss_and_keeps_the_whole_trace(tmp_path: Path):
    (tmp_path / "badloss.py").write_text(BAD)
    loss: Any = load(f"{tmp_path}/badloss.py:Bad", "--loss")
    with pytest.raises(LossError, match=r"AttributeError: .*no_such_field.* \(.*badloss.py:5\)") as caught:
        show_plan(grpo.Config(loss=loss()))
    assert 'badloss.py", line 10, in __call__' in caught.value.trace
    assert 'badloss.py", line 5, in ratio' in caught.value.trace
