"""Several adapters over one base: each is trained as if it were alone, and a failure of one touches no other."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.ranks import run_ranks
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.protocol import Loss, LossInputs, Scope
from forge_rl.engines.adapter_settings import AdamStep, AdapterPass, AdapterSettings, PassResult
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.adapter_engine import TitanAdapters
from forge_rl.engines.titan.lora import adapted_modules_of
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import CheckpointError, ConfigError, ForgeError, LossError
from forge_rl.metrics import reduce
from forge_rl.packing.rows import Minibatch
from tests.fakes import make_model, packed, random_batch, train_batch

pytestmark = pytest.mark.usefixtures("process_group")

LOSS = ClippedSurrogate()
ADAM = AdamStep(lr=1e-2, beta2=0.95, max_grad_norm=1.0)
VOCAB = 30


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_model(folder, "qwen3")
    return folder


def adapters_of(base: Path, rank: int = 4, **settings: Any) -> TitanAdapters:
    options = {"dtype": "float32", "seq_len": 64, **settings}
    return TitanAdapters(TitanEngine(base, TrainSettings(lora=LoRAConfig(rank=rank), **options)), base)


def minibatch(seed: int) -> Minibatch:
    (rows,) = packed(random_batch(seed, vocab=VOCAB)).minibatches
    return rows


def poisoned(rows: Minibatch) -> Minibatch:
    """Rows with a NaN advantage."""
    first = rows.rows[0]
    bad = torch.where(first.mask, torch.nan, first.advantages)
    return replace(rows, rows=(replace(first, advantages=bad), *rows.rows[1:]))


def train(adapters: TitanAdapters, name: str, seeds: range) -> list[float]:
    norms = []
    for seed in seeds:
        adapters.run(name, minibatch(seed), LOSS)
        norms.append(reduce(adapters.step(name, ADAM))["grad_norm"])
    return norms


def factors(adapters: TitanAdapters, name: str, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True)
    adapters.save(name, folder)
    return load_file(folder / "adapter_model.safetensors") | load_file(folder / "training.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


KINDS = {
    "a": AdapterSettings(lora=LoRAConfig(rank=4), seed=1),
    "b": AdapterSettings(lora=LoRAConfig(rank=2, alpha=8.0), seed=2),
    "c": AdapterSettings(lora=LoRAConfig(rank=4, targets=("q_proj", "v_proj")), seed=3),
}
SEEDS = {"a": range(3), "b": range(10, 13), "c": range(20, 23)}


def test_adapters_in_turn_are_trained_as_each_alone_bit_for_bit(base: Path, tmp_path: Path):
    together = adapters_of(base)
    for name, settings in KINDS.items():
        together.open(name, settings)
    for index in range(3):
        for name in KINDS:  # passes of all come before the steps of any
            together.run(name, minibatch(SEEDS[name][index]), LOSS)
        for name in reversed(KINDS):
            together.step(name, ADAM)
    for name, settings in KINDS.items():
        alone = adapters_of(base)
        alone.open(name, settings)
        train(alone, name, SEEDS[name])
        saved, expected = (factors(engine, name, tmp_path / f"{name}{engine is alone}") for engine in (together, alone))
        assert equal(saved, expected)
        assert together.updates(name) == 3
        b = [tensor for key, tensor in saved.items() if "lora_B" in key]
        assert all(tensor.any() for tensor in b)
        peft_config = (tmp_path / f"{name}False" / "adapter_config.json").read_text()
        assert f'"r": {settings.lora.rank}' in peft_config


def test_a_named_adapter_equals_the_same_run_of_its_own(base: Path, tmp_path: Path):
    adapters = adapters_of(base)
    adapters.open("a", KINDS["a"])
    train(adapters, "a", range(3))
    optimizer = OptimizerConfig(lr=1e-2, max_grad_norm=1.0)
    lora = LoRAConfig(rank=4, dtype="float32")
    settings = TrainSettings(lora=lora, lora_seed=1, dtype="float32", seq_len=64, optimizer=optimizer)
    plain = TitanEngine(base, settings)
    for seed in range(3):
        train_batch(plain, packed(random_batch(seed, vocab=VOCAB)), LOSS)
    factors(adapters, "a", tmp_path / "a")
    for (_, module), (_, other) in zip(
        adapted_modules_of(adapters._engine.model), adapted_modules_of(plain.model), strict=True
    ):
        assert torch.equal(module.lora_A, other.lora_A)
        assert torch.equal(module.lora_B, other.lora_B)


def test_nan_and_errors_of_one_leave_all_as_they_were(base: Path, tmp_path: Path):
    adapters, untouched = adapters_of(base), adapters_of(base)
    for engine in (adapters, untouched):
        for name in ("a", "b"):
            engine.open(name, KINDS[name])
            engine.run(name, minibatch(1), LOSS)
    for name in ("a", "b", "a"):
        with pytest.raises(LossError, match="not finite"):
            adapters.run(name, poisoned(minibatch(2)), LOSS)
    for name in ("a", "b"):
        for engine in (adapters, untouched):
            engine.run(name, minibatch(3), LOSS)  # gradients of both passes add up
            engine.step(name, ADAM)
        assert equal(
            *(factors(engine, name, tmp_path / f"{name}{engine is adapters}") for engine in (adapters, untouched))
        )
    with pytest.raises(ConfigError, match="no gradient"):
        adapters.step("a", ADAM)
    with pytest.raises(ConfigError, match="no adapter 'x'"):
        adapters.run("x", minibatch(1), LOSS)


def test_a_saved_adapter_goes_on_where_it_was_and_peft_reads_it(base: Path, tmp_path: Path):
    adapters = adapters_of(base)
    adapters.open("b", KINDS["b"])
    train(adapters, "b", range(2))
    factors(adapters, "b", tmp_path / "saved")
    scored = adapters.run("b", minibatch(5), LOSS, backward=False)
    train(adapters, "b", range(2, 4))
    expected = factors(adapters, "b", tmp_path / "expected")
    other = adapters_of(base)
    other.open("a", KINDS["a"])
    other.open("again", replace(KINDS["b"], seed=9))
    assert other.load("again", tmp_path / "saved", optimizer=True) == 2
    again = other.run("again", minibatch(5), LOSS, backward=False)
    assert all(torch.equal(*pair) for pair in zip(scored.logprobs, again.logprobs, strict=True))
    train(other, "again", range(2, 4))
    assert equal(expected, factors(other, "again", tmp_path / "again"))
    with pytest.raises(ConfigError, match="scale"):
        other.load("a", tmp_path / "saved", optimizer=True)
    with pytest.raises(CheckpointError, match=r"the adapter cannot be written to .*No such file"):
        other.save("a", tmp_path / "missing")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "saved")
    row = next(row for row in minibatch(5).rows)
    ids = row.token_ids[row.trees == 0][: int(row.until[0])]
    with torch.no_grad():
        whole = model(ids[None]).logits[0].log_softmax(-1)
    first = int(row.mask.nonzero()[0, 0])  # its whole past is the row's start
    assert whole[first, row.targets[first]].item() == pytest.approx(scored.logprobs[0][first].item(), abs=1e-4)


def test_dropped_and_new_adapters(base: Path):
    adapters = adapters_of(base)
    adapters.open("a", KINDS["a"])
    adapters.run("a", minibatch(1), LOSS)
    adapters.drop("a")
    adapters.open("a", KINDS["a"])
    with pytest.raises(ConfigError, match="no gradient"):
        adapters.step("a", ADAM)
    with pytest.raises(ConfigError, match="already"):
        adapters.open("a", KINDS["a"])
    with pytest.raises(ConfigError, match="rank of adapter 'big' is 8"):
        adapters.open("big", AdapterSettings(lora=LoRAConfig(rank=8)))


MIXED = KINDS | {"d": AdapterSettings(lora=LoRAConfig(rank=1, alpha=4.0), seed=4)}


def passes(seed: int, loss: Loss = LOSS, **of_one: Loss) -> list[AdapterPass]:
    """A pass of each adapter over its own rows, with losses of their own for some."""
    return [
        AdapterPass(name=name, minibatch=minibatch(seed + 10 * index), loss=of_one.get(name, loss))
        for index, name in enumerate(MIXED)
    ]


def worst_deviation(values: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert values.keys() == expected.keys()
    return max(
        float((values[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-30))
        for name in values
    )


def gradients(adapters: TitanAdapters, name: str) -> dict[str, torch.Tensor]:
    training = adapters._trainings[name]
    adapters._activate(training)
    names = [f"{module.adapter_name}/{factor}" for _, module, factor in adapters._factors()]
    pairs = zip(names, adapters._parameters(), strict=True)
    return {key: parameter.grad.clone() for key, parameter in pairs if parameter.grad is not None}


@dataclass(frozen=True, kw_only=True)
class Whitened(ClippedSurrogate):
    """A loss that needs a statistic of the whole minibatch."""

    @property
    def scope(self) -> Scope:
        return "minibatch"

    def statistics(self, tokens: LossInputs) -> dict[str, torch.Tensor]:
        return {"mean": tokens.logprobs.mean()}

    def __call__(self, inputs: LossInputs) -> Any:
        centred = replace(inputs, advantages=inputs.advantages - inputs.statistics["mean"])
        return super().__call__(centred)


class Broken(ClippedSurrogate):
    """A loss with a mistake."""

    def __call__(self, inputs: LossInputs) -> Any:
        raise RuntimeError("no such thing")


def test_rows_of_several_adapters_are_computed_together_and_equal_each_alone(base: Path):
    together, alone = (adapters_of(base, dtype="float64", seq_len=400) for _ in range(2))
    for engine in (together, alone):
        for name, settings in MIXED.items():
            engine.open(name, settings)
    rows = list[int]()
    engine = together._engine
    score = engine.scorer.score

    def counted(model: Any, device_row: Any, scoring: Any) -> Any:
        rows.append(len(device_row.row))
        return score(model, device_row, scoring)

    engine.scorer.score = counted  # type: ignore[method-assign]
    for seed in range(3):
        adapter_passes = passes(seed, b=Whitened())
        mixed = together.run_many(adapter_passes)
        for adapter_pass, result in zip(adapter_passes, mixed, strict=True):
            assert isinstance(result, PassResult)
            expected = alone.run(adapter_pass.name, adapter_pass.minibatch, adapter_pass.loss)
            metrics = reduce(expected.metrics)
            metrics.pop("states/recomputed_tokens", None)  # of rows, which are no single adapter's when mixed
            assert reduce(result.metrics) == pytest.approx(metrics, rel=1e-9, abs=1e-12)
            for scores, alone_scores in zip(result.logprobs, expected.logprobs, strict=True):
                torch.testing.assert_close(scores, alone_scores, rtol=1e-9, atol=1e-9)
            assert worst_deviation(gradients(together, adapter_pass.name), gradients(alone, adapter_pass.name)) < 1e-9
            norms = [reduce(adapters.step(adapter_pass.name, ADAM))["grad_norm"] for adapters in (together, alone)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    assert len(rows) == 3 * 2  # all rows in adapter_pass, and before that those of which statistics are needed


def test_nan_and_errors_in_a_shared_row_touch_no_other_adapter(base: Path, monkeypatch: pytest.MonkeyPatch):
    propagate = torch.autograd.backward

    def backward(outputs: Any, gradients: Any = None, *arguments: Any, **options: Any) -> None:
        assert all(gradient.isfinite().all() for gradient in gradients or () if gradient is not None)
        propagate(outputs, gradients, *arguments, **options)

    monkeypatch.setattr(torch.autograd, "backward", backward)  # the base's layers compute all rows together
    together, alone = (adapters_of(base, dtype="float64", seq_len=400) for _ in range(2))
    for engine in (together, alone):
        for name, settings in MIXED.items():
            engine.open(name, settings)
            engine.run(name, minibatch(7), LOSS)  # its gradient stays
    before = {name: gradients(together, name) for name in MIXED}
    adapter_passes = passes(1, c=Broken())
    adapter_passes[1] = replace(adapter_passes[1], minibatch=poisoned(adapter_passes[1].minibatch))
    with torch.no_grad():  # its own forward pass is NaN
        together._activate(together._initial)
        together._trainings["d"].values[1].fill_(torch.nan)
    unknown = replace(adapter_passes[0], name="x")
    a, b, c, d, x = together.run_many([*adapter_passes, unknown])
    assert isinstance(a, PassResult)
    assert [type(error) for error in (b, c, d, x)] == [LossError, LossError, LossError, ConfigError]
    assert "not finite" in str(b)
    assert "no such thing" in str(c)
    alone.run("a", adapter_passes[0].minibatch, LOSS)
    assert worst_deviation(gradients(together, "a"), gradients(alone, "a")) < 1e-9
    for name in ("b", "c", "d"):
        assert equal(gradients(together, name), before[name])
    with pytest.raises(ConfigError, match="two passes"):
        together.run_many([adapter_passes[0], adapter_passes[0]])


def test_dropout_and_passes_without_gradient_in_shared_rows(base: Path):
    lora = LoRAConfig(rank=4, dropout=0.25)
    settings = TrainSettings(lora=lora, dtype="float64", seq_len=400)
    together, alone = (TitanAdapters(TitanEngine(base, settings), base) for _ in range(2))
    for engine in (together, alone):
        for seed, name in enumerate(MIXED):
            engine.open(name, AdapterSettings(lora=lora, seed=seed))
    for seed in range(2):
        adapter_passes = passes(seed)
        adapter_passes[3] = replace(adapter_passes[3], backward=False)
        for adapter_pass, result in zip(adapter_passes, together.run_many(adapter_passes), strict=True):
            assert isinstance(result, PassResult)
            expected = alone.run(
                adapter_pass.name, adapter_pass.minibatch, adapter_pass.loss, backward=adapter_pass.backward
            )
            assert reduce(result.metrics)["loss"] == pytest.approx(reduce(expected.metrics)["loss"], rel=1e-9)
            for scores, alone_scores in zip(result.logprobs, expected.logprobs, strict=True):
                torch.testing.assert_close(scores, alone_scores, rtol=1e-9, atol=1e-9)
            if adapter_pass.backward:
                assert (
                    worst_deviation(gradients(together, adapter_pass.name), gradients(alone, adapter_pass.name)) < 1e-9
                )
                for adapters in (together, alone):
                    adapters.step(adapter_pass.name, ADAM)
    assert not gradients(together, "d")


def test_passes_without_a_gradient_have_statistics_of_all_rows_and_passes_may_have_no_rows(base: Path):
    adapters, plain = adapters_of(base, dtype="float64"), TitanEngine(base, TrainSettings(dtype="float64", seq_len=64))
    for name, settings in KINDS.items():
        adapters.open(name, settings)
    (rows,) = packed(random_batch(1, vocab=VOCAB, groups=6), seq_len=40).minibatches
    empty = replace(rows, rows=())
    assert len(rows.rows) > 1
    adapter_passes = [
        AdapterPass(name=name, minibatch=part, loss=Whitened(), backward=backward)
        for name, part, backward in (("a", rows, False), ("b", empty, True), ("c", empty, False))
    ]
    expected = reduce(plain.evaluate([rows], Whitened()))["loss"]  # of the base, whose adapter is still 0
    for results in (
        adapters.run_many(adapter_passes),
        [
            adapters.run(adapter_pass.name, adapter_pass.minibatch, adapter_pass.loss, backward=adapter_pass.backward)
            for adapter_pass in adapter_passes
        ],
    ):
        scored, *no_rows = results
        assert isinstance(scored, PassResult)
        assert reduce(scored.metrics)["loss"] == pytest.approx(expected, rel=1e-9)
        assert all(isinstance(result, PassResult) and not result.logprobs for result in no_rows)
    assert not gradients(adapters, "b")
    assert reduce(plain.evaluate([rows, empty], Whitened()))["loss"] == pytest.approx(expected, rel=1e-9)


def test_gradients_without_a_finite_sum_are_dropped_and_later_steps_work(base: Path, tmp_path: Path):
    adapters, untouched = adapters_of(base), adapters_of(base)
    for engine in (adapters, untouched):
        engine.open("a", KINDS["a"])
    adapters.run("a", minibatch(1), LOSS)
    for parameter in adapters._parameters():
        parameter.grad = torch.full_like(parameter, 1e38)  # each is finite
    with pytest.raises(LossError, match="are dropped"):
        adapters.step("a", ADAM)
    for engine in (adapters, untouched):
        train(engine, "a", range(1))
    assert equal(*(factors(engine, "a", tmp_path / str(engine is adapters)) for engine in (adapters, untouched)))


def test_an_offloaded_trainer_saves_loads_and_swaps_its_adapters(base: Path, tmp_path: Path):
    adapters = adapters_of(base)
    for name in ("a", "b"):
        adapters.open(name, KINDS[name])
        train(adapters, name, range(2))
    expected = {name: factors(adapters, name, tmp_path / name) for name in ("a", "b")}
    offload = adapters._engine.offload
    for index, name in enumerate(("b", "a", "b")):  # the first is in the model already
        assert offload()
        assert equal(factors(adapters, name, tmp_path / f"{index}"), expected[name])
    for name in ("a", "b"):
        assert offload()
        assert adapters.load(name, tmp_path / name, optimizer=True) == 2
    assert offload()
    adapters.rest()
    assert equal(factors(adapters, "b", tmp_path / "end"), expected["b"])


def test_dropout_goes_on_after_a_load(base: Path, tmp_path: Path):
    lora = LoRAConfig(rank=4, dropout=0.25)
    settings = TrainSettings(lora=lora, dtype="float32", seq_len=64)
    adapters, other = (TitanAdapters(TitanEngine(base, settings), base) for _ in range(2))
    for engine in (adapters, other):
        engine.open("a", AdapterSettings(lora=lora, seed=1))
    adapters.run("a", minibatch(1), LOSS)  # a step takes the gradients of several passes
    train(adapters, "a", range(2))
    factors(adapters, "a", tmp_path / "saved")
    train(adapters, "a", range(3))
    assert other.load("a", tmp_path / "saved", optimizer=True) == 2
    train(other, "a", range(3))
    assert equal(factors(adapters, "a", tmp_path / "expected"), factors(other, "a", tmp_path / "loaded"))
    counts = tmp_path / "saved" / "training.json"
    saved_counts = json.loads(counts.read_text())
    assert saved_counts.pop("planned") == 3
    counts.write_text(json.dumps(saved_counts))  # as of a version that did not save it
    assert other.load("a", tmp_path / "saved", optimizer=True) == 2
    counts.write_text(json.dumps(saved_counts | {"planned": -1}))
    with pytest.raises(CheckpointError, match="-1 passes"):
        other.load("a", tmp_path / "saved", optimizer=True)


LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"tensor_parallel_degree": 2}, {"data_parallel_replicate_degree": 2})


def train_in_layouts(rank: int, base: Path, out: Path) -> None:
    """Train two adapters in turn in each layout of two ranks, through a save and a load, and save them."""
    for index, degrees in enumerate(LAYOUTS):
        adapters = adapters_of(base, dtype="float64", **degrees)
        shares = 2 // degrees.get("tensor_parallel_degree", 1)
        for name in ("b", "c"):
            adapters.open(name, KINDS[name])
        for seed in range(4):
            for name in ("b", "c"):
                adapters._engine.offload()
                (part,) = packed(random_batch(seed + 10, vocab=VOCAB), shares=shares).minibatches
                own = replace(part, rows=part.rows[rank % shares :: shares])
                with pytest.raises(LossError, match="not finite"):
                    adapters.run(name, poisoned(own) if rank == 0 else own, LOSS)
                adapters.run(name, own, LOSS)
                adapters.step(name, ADAM)
                place = out / f"{index}-{name}-{seed}"
                place.mkdir(exist_ok=True)
                adapters.save(name, place)
            if seed == 1:
                adapters.drop("c")
                adapters.open("c", KINDS["c"])
                assert adapters.load("c", out / f"{index}-c-1", optimizer=True) == 2
                # Files that only one rank cannot use fail on both, and change nothing.
                with pytest.raises(CheckpointError, match=r"cannot be written to .*No such file"):
                    adapters.save("c", out / "missing" / f"{index}-{rank}")
                with pytest.raises(ForgeError, match="cannot be read"):
                    adapters.load("c", out / (f"{index}-c-0" if rank == 0 else "missing"), optimizer=True)


@pytest.mark.long
def test_layouts_of_two_ranks_train_several_adapters_as_one_process_does(base: Path, tmp_path: Path):
    alone = adapters_of(base, dtype="float64")
    run_ranks(train_in_layouts, 2, base, tmp_path)
    for name in ("b", "c"):
        alone.open(name, KINDS[name])
        train(alone, name, range(10, 14))
        expected = factors(alone, name, tmp_path / f"alone-{name}")
        for index in range(len(LAYOUTS)):
            folder = tmp_path / f"{index}-{name}-3"
            saved = load_file(folder / "adapter_model.safetensors") | load_file(folder / "training.safetensors")
            assert saved.keys() == expected.keys()
            worst = max(
                float((saved[key] - values).abs().max() / values.abs().max()) for key, values in expected.items()
            )
            # What is saved is rounded to float32, at times to its next number.
            assert worst < 2.5e-7, (name, LAYOUTS[index], worst)
