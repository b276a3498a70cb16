"""Pipeline parallelism: the split of layers, the order of the stages' work, and what each of them keeps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.long_row import row_of
from benchmarks.ranks import run_ranks
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.protocol import LossInputs, Scope
from forge_rl.engines import memory
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.degrees import check_model
from forge_rl.engines.factory import plan_training
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.engines.stage_plan import stage_layers
from forge_rl.engines.titan.shards import local
from forge_rl.errors import ConfigError, LossError
from forge_rl.metrics import reduce
from forge_rl.packing.rows import Minibatch
from tests.fakes import make_model, packed, random_batch
from tests.test_plan import SHAPE as PLANNED
from tests.test_plan import peak_of

SHAPE: dict[str, object] = {"num_hidden_layers": 5, "vocab_size": 43}


def lengths(folder: Path, stages: int, **shape: object) -> list[int]:
    make_model(folder, **shape)
    return [len(layers) for layers in stage_layers(read_architecture(folder), stages)]


def test_layers_are_split_by_what_they_compute_and_the_head_counts(tmp_path: Path):
    dims = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32  # 10,304 weights, of which the head has 0.01 or 4 times as many
    small, large = ({"num_hidden_layers": 8, "vocab_size": vocab, **dims} for vocab in (4, 4 * layer // 32))
    assert lengths(tmp_path, 1, **small) == [8]
    assert lengths(tmp_path, 3, **small) == [3, 3, 2]
    assert lengths(tmp_path, 2, **large) == [6, 2], "a head of four layers"
    assert lengths(tmp_path, 3, **large) == [4, 3, 1], (
        "of three fourths of the work each stage has one, as near as can be"
    )
    assert lengths(tmp_path, 8, **large) == [1] * 8


def record(rank: int, folder: Path) -> tuple[list[str], int]:
    """Train on rows in three stages; return the order of a stage's work, and its most rows under way."""
    from forge_rl.engines.titan.stages import Pipeline
    from forge_rl.engines.titan.train import TitanEngine

    events, most = list[str](), 0
    leave, backward, give_back = Pipeline.leave, Pipeline.backward, Pipeline.give_back

    def leaves(self: Pipeline, hidden: torch.Tensor) -> None:
        nonlocal most
        leave(self, hidden)
        events.append("F")
        most = max(most, len(self._begun))

    def goes_back(self: Pipeline) -> None:
        backward(self)
        events.append("B")

    def gives_back(self: Pipeline) -> None:
        give_back(self)
        events.extend("FB" if self.ahead == 0 else "")

    Pipeline.leave, Pipeline.backward, Pipeline.give_back = leaves, goes_back, gives_back  # type: ignore[method-assign]
    engine = TitanEngine(folder, TrainSettings(dtype="float64", seq_len=64, pipeline_parallel_degree=3))
    rows = packed(random_batch(0, vocab=43, groups=6), seq_len=40).rows[:5]
    minibatch = Minibatch(rows=rows, tokens=sum(int(row.mask.sum()) for row in rows), sequences=len(rows))
    engine.train_batch([minibatch], StepRequest(loss=ClippedSurrogate(), total_updates=9))
    return events, most


def test_a_stage_starts_a_row_ahead_per_later_stage_then_alternates(tmp_path: Path):
    make_model(tmp_path, **SHAPE)
    records = run_ranks(record, 3, tmp_path)
    assert ["".join(events) for events, _ in records] == ["FFFBFBFBBB", "FFBFBFBFBB", "FBFBFBFBFB"]
    assert [max_begun for _, max_begun in records] == [3, 2, 0]


class Broken(ClippedSurrogate):
    """A loss that cannot compute what it needs of the whole minibatch."""

    @property
    def scope(self) -> Scope:
        return "minibatch"

    def statistics(self, tokens: LossInputs) -> dict[str, torch.Tensor]:
        raise ValueError("no such statistic")


def train_in_stages(rank: int, folder: Path) -> list[Any]:
    """Train in two stages: where gradients are reduced once, after each row, and in bfloat16; return what engines
    return."""
    from forge_rl.engines.titan.train import TitanEngine

    laid = packed(random_batch(0, vocab=43, groups=6), seq_len=40)
    results = list[Any]()
    for share, dtype in ((memory._GRADIENTS_SHARE, "float64"), (10**9, "float64"), (10**9, "bfloat16")):
        memory._GRADIENTS_SHARE = share
        settings = TrainSettings(dtype=dtype, seq_len=64, pipeline_parallel_degree=2)  # type: ignore[arg-type]
        engine = TitanEngine(folder, settings, reference=True)
        loss = ClippedSurrogate(kl_coef=0.1)
        metrics = engine.train_batch(laid.minibatches, StepRequest(loss=loss, epochs=2, total_updates=9)).metrics
        noise = engine.layer_noise(laid.rows, temperature=1.0, relative=1e-3)
        evaluated = engine.evaluate(laid.minibatches, loss)
        results.append(([reduce(metrics_of_step or {}) for metrics_of_step in metrics], noise, reduce(evaluated)))
        results[-1] += engine.parameters, engine.specs()
        for call in (
            lambda engine=engine: engine.train_batch(laid.minibatches, StepRequest(loss=Broken(), total_updates=9)),
            lambda engine=engine: engine.evaluate(laid.minibatches, Broken()),
        ):
            with pytest.raises(LossError, match="no such statistic"):  # on all stages, none of which is left waiting
                call()
    return results


@pytest.mark.usefixtures("process_group")
def test_stages_return_what_one_process_does(tmp_path: Path):
    from forge_rl.engines.titan.train import TitanEngine

    make_model(tmp_path, **SHAPE, tie_word_embeddings=True)
    laid = packed(random_batch(0, vocab=43, groups=6), seq_len=40)
    assert len(laid.rows) > 3
    first, last = run_ranks(train_in_stages, 2, tmp_path)
    loss = ClippedSurrogate(kl_coef=0.1)
    for index, (dtype, near) in enumerate((("float64", 1e-10), ("float64", 1e-10), ("bfloat16", 0.1))):
        engine = TitanEngine(tmp_path, TrainSettings(dtype=dtype, seq_len=64), reference=True)  # type: ignore[arg-type]
        metrics = engine.train_batch(laid.minibatches, StepRequest(loss=loss, epochs=2, total_updates=9)).metrics
        expected = [reduce(metrics_of_step or {}) for metrics_of_step in metrics]
        assert [step_metrics["grad_norm"] for step_metrics in last[index][0]] == pytest.approx(
            [step_metrics["grad_norm"] for step_metrics in expected], rel=near
        )
        assert first[index][0][0]["grad_norm"] == last[index][0][0]["grad_norm"]
        assert first[index][3:] == last[index][3:] == (engine.parameters, engine.specs()), "of all stages"
        if dtype == "bfloat16":
            continue
        for step_metrics, expected_metrics in zip(last[index][0], expected, strict=True):
            assert step_metrics.pop("pipeline/idle_share") == pytest.approx(1 / (len(laid.rows) + 1))
            assert step_metrics == pytest.approx(expected_metrics, rel=1e-9, abs=1e-12)
        noise = engine.layer_noise(laid.rows, temperature=1.0, relative=1e-3)
        assert len(noise) == 5
        for scale, expected_scale in zip(last[index][1], noise, strict=True):
            assert scale == pytest.approx(expected_scale, rel=1e-9)
        assert last[index][2] == pytest.approx(reduce(engine.evaluate(laid.minibatches, loss)), rel=1e-9, abs=1e-12)


def test_stages_that_have_nothing_to_compute_or_to_train_are_refused(tmp_path: Path):
    make_model(tmp_path, **SHAPE)
    with pytest.raises(ConfigError, match="degree is 6, and the model has 5 layers"):
        check_model(TrainSettings(pipeline_parallel_degree=6), 6, read_architecture(tmp_path))
    assert run_ranks(refusal, 2, tmp_path) == ["all weights of pipeline stage 0, with layers 0 to 2, are frozen"] * 2


def refusal(rank: int, folder: Path) -> str:
    from forge_rl.engines.titan.train import TitanEngine

    frozen = ("model.embed_tokens.*", "model.layers.[0-2].*")
    with pytest.raises(ConfigError) as error:
        TitanEngine(folder, TrainSettings(pipeline_parallel_degree=2, frozen=frozen))
    return error.value.message


def ends(rank: int, folder: Path) -> list[torch.Tensor]:
    """Train with moments that are rounded at random; return the tied weight, and its gradient's effect."""
    from forge_rl.engines.titan.shards import named_weights
    from forge_rl.engines.titan.train import TitanEngine

    torch.manual_seed(rank)
    settings = TrainSettings(dtype="float32", seq_len=64, pipeline_parallel_degree=2, optimizer_state="int8")
    engine = TitanEngine(folder, settings)
    laid = packed(random_batch(0, vocab=43, groups=6), seq_len=40)
    weights = list[torch.Tensor]()
    for _ in range(3):
        weights += [local(weight.detach()).clone() for name, weight in named_weights(engine.model) if "embed" in name]
        engine.train_batch(laid.minibatches, StepRequest(loss=ClippedSurrogate(), total_updates=9))
    return weights


def test_a_tied_weight_stays_one_where_moments_are_rounded_at_random(tmp_path: Path):
    make_model(tmp_path, **SHAPE, tie_word_embeddings=True, hidden_size=128, head_dim=32, intermediate_size=64)
    first, last = run_ranks(ends, 2, tmp_path)
    assert len(first) == len(last) == 3
    assert all(torch.equal(weight, other) for weight, other in zip(first, last, strict=True))
    assert not torch.equal(first[1], first[2])


def biases(rank: int, folder: Path, **degrees: int) -> dict[str, torch.Tensor]:
    """Train with biases in the choice of experts that move; return those of this stage."""
    from forge_rl.engines.titan.shards import named_weights
    from forge_rl.engines.titan.train import TitanEngine

    engine = TitanEngine(folder, TrainSettings(dtype="float64", seq_len=64, expert_balance="bias", **degrees))  # type: ignore[arg-type]
    laid = packed(random_batch(0, vocab=43, groups=6), seq_len=40)
    engine.train_batch(laid.minibatches, StepRequest(loss=ClippedSurrogate(), epochs=3, total_updates=9))
    return {name: bias.clone() for name, bias in named_weights(engine.model) if name.endswith("expert_bias_E")}


@pytest.mark.usefixtures("process_group")
def test_expert_biases_move_as_in_one_process_despite_dense_stages(tmp_path: Path):
    make_model(tmp_path, "deepseek_v3", num_hidden_layers=3)
    alone = biases(0, tmp_path)
    for stages in (2, 3):
        rank_biases = run_ranks(partial(biases, pipeline_parallel_degree=stages), stages, tmp_path)
        joined = {name: bias for stage in rank_biases for name, bias in stage.items()}
        assert joined.keys() == alone.keys()
        assert stages == 2 or not rank_biases[0], "the first of three stages is dense"
        assert all(torch.equal(joined[name], bias) for name, bias in alone.items())


def peaks(rank: int, folder: Path) -> int:
    """Return the most bytes that an update allocates at a time."""
    from forge_rl.engines.titan import head
    from forge_rl.engines.titan.train import TitanEngine

    head.HEAD_CHUNK_BYTES = 1 << 20
    engine = TitanEngine(folder, TrainSettings(dtype="float32", seq_len=768, pipeline_parallel_degree=2))
    peak_of(engine, row_of(16, 3000))  # makes what lasts
    return peak_of(engine, *(row_of(768, 3000) for _ in range(4)))


def test_the_plan_is_of_the_stage_that_allocates_the_most(tmp_path: Path):
    make_model(tmp_path, **PLANNED)
    settings = TrainSettings(dtype="float32", seq_len=768)
    one_stage = plan_training(tmp_path, settings, ranks=1, reference=False)
    planned = plan_training(tmp_path, replace(settings, pipeline_parallel_degree=2), ranks=2, reference=False)
    assert 0.5 <= planned.weights / one_stage.weights < 0.7
    assert planned.optimizer == pytest.approx(2 * planned.weights, rel=1e-3)
    rank_peaks = run_ranks(peaks, 2, tmp_path)
    assert planned.gradients + planned.activations + planned.head == pytest.approx(max(rank_peaks), rel=0.1)
