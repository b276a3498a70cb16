"""Training of LoRA against peft: first values, gradients, dropout, the reference and chunks of an adapted head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import StepRequest
from forge_rl.engines.titan import adapter_switch, head
from forge_rl.engines.titan.lora import without_adapters
from forge_rl.metrics import reduce
from forge_rl.system.seeds import derive_seed
from tests.fakes import make_model, packed, random_batch, train_batch
from tests.lora_engines import (
    FAMILIES,
    LOSS,
    SPARSE,
    WHOLE,
    engine_of,
    gradient_deviation,
    named_factors,
    trained_engine,
    with_peft,
)
from tests.plain_trainer import PlainTrainer
from tests.test_titan_train import plain_steps

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *((family, LoRAConfig(rank=3, alpha=5.0)) for family in FAMILIES),
        ("qwen3", LoRAConfig(rank=3, alpha=5.0, rslora=True)),
        ("qwen3", LoRAConfig(rank=3, targets=("lm_head",))),
        *((family, WHOLE) for family in SPARSE),
        ("qwen3_moe", LoRAConfig(rank=1, rslora=True, targets=("experts",))),
    ],
)
def test_gradients_are_those_of_peft(family: str, lora: LoRAConfig, tmp_path: Path):
    deviation, largest = gradient_deviation(tmp_path, family, lora)
    assert largest > 1e-3
    assert deviation < 1e-9


def test_first_values_are_of_the_seed_and_peft_starts_as_far(tmp_path: Path):
    make_model(tmp_path)
    firsts = [
        torch.cat([values.flatten() for name, values in named_factors(engine).items() if "lora_A" in name])
        for seed in (0, 0, 1)
        for engine in [engine_of(tmp_path, LoRAConfig(rank=4, targets=("k_proj",)), lora_seed=seed)]
    ]
    assert torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[0], firsts[2])
    bound = 24**-0.5
    assert 0.9 * bound < float(firsts[0].detach().abs().max()) <= bound


def test_adapters_switched_off_are_the_model_that_training_started_from(tmp_path: Path):
    laid = packed(random_batch(0, vocab=43))
    make_model(tmp_path)
    start = engine_of(tmp_path, LoRAConfig()).logprobs(laid.rows, temperature=1.0)
    loss = ClippedSurrogate(kl_coef=0.3)
    engine, full_engine = (engine_of(tmp_path, LoRAConfig(rank=4 * on), reference=True) for on in (1, 0))
    assert engine._reference is None
    assert full_engine._reference is not None
    train_batch(engine, laid, loss, total_updates=5)
    with without_adapters(engine.model):
        off = engine.scorer.logprobs(engine.model, laid.rows, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(off, start, strict=True))
    references = engine._updates(laid.minibatches, loss, 1.0)[0].references
    assert all(torch.equal(reference, first) for reference, first in zip(references, start, strict=False))
    assert not torch.equal(engine.logprobs(laid.rows, temperature=1.0)[0], start[0])


def test_dropout_is_in_updates_only_and_repeats_when_recomputed(tmp_path: Path):
    laid = packed(random_batch(0, vocab=43))
    make_model(tmp_path)
    ends = []
    for dropout, recomputed in ((0.0, "none"), (0.5, "none"), (0.5, "full")):
        engine = engine_of(tmp_path, LoRAConfig(rank=4, dropout=dropout), activation_checkpointing=recomputed)
        for _ in range(2):
            train_batch(engine, laid, LOSS, total_updates=5)
        ends.append(torch.cat(engine.logprobs(laid.rows, temperature=1.0)))
        assert torch.equal(ends[-1], torch.cat(engine.logprobs(laid.rows, temperature=1.0)))
    assert not torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[1], ends[2], rtol=1e-10, atol=1e-12)


def test_dropout_hashes_the_tokens_of_a_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    places = list[tuple[Any, ...]]()

    def recorded(seed: int, purpose: Any, *place: Any) -> int:
        places.append(place)
        return derive_seed(seed, purpose, *place)

    engine = trained_engine(tmp_path, LoRAConfig(rank=4, dropout=0.5))
    (minibatch,) = packed(random_batch(2, vocab=43)).minibatches
    monkeypatch.setattr(adapter_switch, "derive_seed", recorded)
    engine.train_batch([minibatch], StepRequest(loss=LOSS, total_updates=5))
    hashed_rows = [place for place in places if len(place) == 2]
    assert hashed_rows == [(engine.planned, tuple(row.token_ids.tolist())) for row in minibatch.rows]
    modules = [place for place in places if len(place) == 1]
    assert len(modules) == len(places) - len(hashed_rows)
    assert len(modules) == len(set(modules)) * len(minibatch.rows) > len(minibatch.rows)


def test_recorded_logprobs_are_of_the_model_without_dropout(tmp_path: Path):
    engine = trained_engine(tmp_path, LoRAConfig(rank=4, dropout=0.5))
    (minibatch, *_) = packed(random_batch(2, vocab=43)).minibatches
    expected = engine.logprobs(minibatch.rows, temperature=1.0)
    request = StepRequest(loss=LOSS, total_updates=5, version=0, scored_minibatches=1)
    recorded = engine.train_batch([minibatch], request).scores
    for row, scores, logprobs in zip(minibatch.rows, recorded, expected, strict=True):
        torch.testing.assert_close(scores[row.mask, 0], logprobs[row.mask], rtol=0, atol=1e-12)


def test_adapters_act_where_a_frozen_reference_scores_the_same_rows(tmp_path: Path):
    """Updates with a penalty are those of peft's model with its adapters switched off as the reference."""
    lora, loss = LoRAConfig(rank=3), ClippedSurrogate(kl_coef=0.3)
    model = make_model(tmp_path, "qwen3")
    engine = engine_of(tmp_path, lora, reference=True)
    plain = PlainTrainer(model, engine.model, OptimizerConfig(lr=1e-2, max_grad_norm=1e9))
    plain.model = with_peft(plain.model, engine, lora)
    plain._trained = [parameter for parameter in plain.model.parameters() if parameter.requires_grad]
    plain._optimizer = torch.optim.AdamW(plain._trained, betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(3):
        batch = random_batch(seed, vocab=43)
        metrics = reduce(train_batch(engine, packed(batch, seq_len=64), loss, total_updates=5))
        (expected,) = plain_steps(plain, batch, loss)
        assert {name: metrics[name] for name in ("loss", "grad_norm")} == pytest.approx(
            {name: expected[name] for name in ("loss", "grad_norm")}, rel=1e-9
        )
    trained = {name: parameter for name, parameter in plain.model.named_parameters() if parameter.requires_grad}
    for name, factor in named_factors(engine).items():
        torch.testing.assert_close(factor.detach(), trained[name].detach(), rtol=1e-8, atol=1e-10)


def test_an_adapted_head_is_scored_in_chunks_as_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Logits are held for a few tokens at a time, with the logprobs and gradients of one product."""
    make_model(tmp_path, "qwen3")
    lora, laid = LoRAConfig(rank=3, targets=("q_proj", "lm_head")), packed(random_batch(1, vocab=43))
    ends, sizes = [], []
    product = head._product

    def recorded(*arguments: Any) -> torch.Tensor:
        logits = product(*arguments)
        sizes.append(len(logits))
        return logits

    monkeypatch.setattr(head, "_product", recorded)
    for chunk_bytes in (head.HEAD_CHUNK_BYTES, 43 * 4 * 5):
        monkeypatch.setattr(head, "HEAD_CHUNK_BYTES", chunk_bytes)
        sizes.clear()
        engine = engine_of(tmp_path, lora)
        for _ in range(2):
            train_batch(engine, laid, ClippedSurrogate(entropy_coef=0.1), total_updates=5)
        largest = max(sizes)
        ends.append((engine.logprobs(laid.rows, temperature=0.7), named_factors(engine)))
    (logprobs, factors), (chunked_logprobs, chunked_factors) = ends
    assert largest == 5
    torch.testing.assert_close(torch.cat(chunked_logprobs), torch.cat(logprobs), rtol=1e-10, atol=1e-12)
    for name, values in factors.items():
        torch.testing.assert_close(chunked_factors[name], values, rtol=1e-9, atol=1e-12)
    with without_adapters(engine.model):
        off = torch.cat(engine.scorer.logprobs(engine.model, laid.rows, 0.7))
    assert not torch.allclose(off, torch.cat(chunked_logprobs))
