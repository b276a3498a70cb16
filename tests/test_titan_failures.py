"""Steps that fail or whose gradient is not finite: the weights and counts that stay."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.engines.protocol import StepRequest
from forge_rl.engines.titan.blocks import training_state
from forge_rl.errors import LossError
from forge_rl.metrics import reduce
from tests.fakes import hf_weights, make_model, packed, random_batch
from tests.test_titan_train import TOTAL_UPDATES, Broken, Failing, engine_of, furthest, step

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_skips_its_update_without_a_trace(value: float, tmp_path: Path):
    make_model(tmp_path)
    engine, other = engine_of(tmp_path), engine_of(tmp_path)
    first = packed(random_batch(0, vocab=43))
    second = packed(random_batch(1, vocab=43, groups=4), minibatches=2)
    episode = int(second.minibatches[0].rows[0].episodes.max())
    for policy in (engine, other):
        step(policy, first)
    step_metrics = engine.train_batch(
        second.minibatches,
        StepRequest(loss=Broken(episode=episode, value=value), total_updates=TOTAL_UPDATES, version=0),
    ).metrics
    expected = step(other, replace(second, minibatches=second.minibatches[1:]))
    assert step_metrics == [None, expected], "the next one is on the published weights still"
    assert engine.updates == other.updates == 2
    assert furthest(hf_weights(engine.model), hf_weights(other.model)) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_fails_leaves_nothing_behind(dtype: str, tmp_path: Path):
    make_model(tmp_path)
    clean, failed = (engine_of(tmp_path, dtype=dtype) for _ in range(2))
    failing_batch = packed(random_batch(0, vocab=43, groups=4), seq_len=32)
    sound_batch = packed(random_batch(1, vocab=43, groups=4), seq_len=32)
    first, second_metrics = (reduce(step(engine, sound_batch)) for engine in (clean, failed))
    assert first == second_metrics
    before = training_state(failed.model, failed.optimizer, {})
    values_before = {name: block.values.clone() for name, block in before.items()}
    for failing_call in (1, len(failing_batch.rows)):
        with pytest.raises(LossError, match=r"ValueError: a bug of a user \(.*test_titan_train.py:\d+\)"):
            step(failed, failing_batch, loss=Failing(at=failing_call))
        assert all(parameter.grad is None for parameter in failed.model.parameters())
        after = training_state(failed.model, failed.optimizer, {})
        assert after.keys() == values_before.keys()
        assert all(torch.equal(after[name].values, values) for name, values in values_before.items())
        assert (failed.updates, len(failed.optimizer.state)) == (1, len(list(failed.model.parameters())))
    failed.planned = clean.planned
    assert reduce(step(clean, sound_batch)) == reduce(step(failed, sound_batch))
    assert furthest(hf_weights(clean.model), hf_weights(failed.model)) == 0


class Early(Loss):
    """Fails before the model's first forward pass."""

    @property
    def aggregation(self) -> Aggregation:
        raise RuntimeError("before anything ran")

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        raise AssertionError("it is not called")


def test_a_step_that_fails_before_the_first_forward_pass_says_why(tmp_path: Path):
    make_model(tmp_path)
    engine = engine_of(tmp_path, dtype="bfloat16", reference=True)
    with pytest.raises(RuntimeError, match="before anything ran"):
        step(engine, packed(random_batch(0, vocab=43)), loss=Early())
    assert reduce(step(engine, packed(random_batch(0, vocab=43))))["grad_norm"] > 0


def test_updates_before_the_one_that_fails_stay_and_count(tmp_path: Path):
    make_model(tmp_path)
    engine, plain = (engine_of(tmp_path) for _ in range(2))
    laid = packed(random_batch(0, vocab=43, groups=4), seq_len=64, minibatches=2)
    first, _ = laid.minibatches
    with pytest.raises(LossError):
        step(engine, laid, loss=Failing(at=len(first.rows) + 1))
    step(plain, replace(laid, minibatches=(first,)))
    assert (engine.updates, engine.planned) == (1, 2)
    assert furthest(hf_weights(engine.model), hf_weights(plain.model)) == 0
