"""Packed rows against transformers, one episode at a time, both in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import without_nan
from forge_rl.engines.families.general import file_names
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import Modelling, TrainSettings
from forge_rl.engines.titan.masks import attention_mask
from forge_rl.engines.titan.shards import named_weights, names_of
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.packing.rows import Row
from tests.dense_masks import dense_mask
from tests.fakes import packed, random_batch
from tests.plain_trainer import InFloat64, share_angles
from tests.zoo.folders import transformers_config, transformers_folder

VOCABULARY = 250
"""Tokens that batches draw from; the folders of the zoo have more."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Distances of packed rows from transformers."""

    forward: float
    """Of logits, absolute."""
    gradient: float
    """Of the gradient of a random sum of logits: of each weight relative to its largest entry, the most of all."""
    spread: float
    """Standard deviation of the logits, which says what the first is to be compared with."""


def engine_of(folder: Path, modelling: Modelling = "auto", **settings: Any) -> TitanEngine:
    """Make an engine, in float64 by default."""
    options = {"dtype": "float64", "seq_len": 128, "optimizer": OptimizerConfig(lr=1e-2), **settings}
    return TitanEngine(folder, TrainSettings(modelling=modelling, **options))


def rows_of(*, share_prefixes: bool, seed: int = 1, turns: int = 3) -> tuple[Row, ...]:
    """Pack several episodes of several turns to a row, with padding at its end."""
    batch = random_batch(seed, vocab=VOCABULARY, groups=3, turns=turns)
    return packed(batch, seq_len=128, share_prefixes=share_prefixes, pad_multiple=16).rows


def compare(engine: TitanEngine, folder: Path, rows: tuple[Row, ...]) -> Deviation:
    """Compare logits and gradients of rows with those of transformers, which sees each episode alone."""
    reference = reference_of(folder)
    if not engine.architecture.family.general:
        share_angles(reference, engine.model)
    forward, spread = run_rows(engine, reference, rows)
    names = file_names(transformers_folder(folder))
    expected_gradients = {
        part.name: part.of(weight.grad)
        for name, weight in reference.named_parameters()
        if weight.grad is not None
        for part in names.parts(name, weight.shape)
    }
    gradient = 0.0
    for name, weight in named_weights(engine.model):
        if not weight.requires_grad:
            continue
        assert weight.grad is not None, name
        for part in names_of(engine.model).parts(name, weight.shape):
            expected_gradient = expected_gradients[part.name]
            if (largest := expected_gradient.abs().max()) != 0:
                difference = (part.of(weight.grad) - expected_gradient).abs().max()
                gradient = max(gradient, without_nan(float(difference / largest)))
    engine.optimizer.zero_grad()
    return Deviation(forward=forward, gradient=gradient, spread=spread)


def reference_of(folder: Path) -> Any:
    """Load transformers' own model of a folder, in float64."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        folder, config=transformers_config(folder), dtype=torch.float64, attn_implementation="eager"
    ).eval()
    for parameter in reference.parameters():  # routers that ask for float32
        parameter.data = parameter.double()
    reference.set_experts_implementation("eager")  # torch's product of groups has no float64
    return reference


def run_rows(engine: TitanEngine, reference: Any, rows: tuple[Row, ...]) -> tuple[float, float]:
    """Run both passes of a random sum of logits in engine and reference, which sees each episode alone.

    Returns:
        The largest difference of a logit, and the standard deviation of the logits.
    """
    model: Any = engine.model
    generator = torch.Generator().manual_seed(0)
    engine.optimizer.zero_grad()
    forward, spread = 0.0, 0.0
    for row in rows:
        masks = row if engine.architecture.family.general else attention_mask(row, window=engine.architecture.window)
        logits = model(row.token_ids[None], row.positions[None], masks)[0]
        weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        weights[row.trees < 0] = 0
        (logits * weights).sum().backward()
        expected = torch.zeros_like(logits)
        with InFloat64():
            for indices, new in _paths(row):
                path_logits = reference(row.token_ids[indices][None]).logits[0][new]
                expected = expected.index_put((indices[new],), path_logits)
            (expected * weights).sum().backward()
        is_token = row.trees >= 0
        forward = max(forward, without_nan(float((logits - expected).detach()[is_token].abs().max())))
        spread = max(spread, float(logits.detach()[is_token].std()))
    return forward, spread


def _paths(row: Row) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tokens of each episode in a row, and which of them no earlier one had."""
    visible, paths, covered = dense_mask(row), list[tuple[torch.Tensor, torch.Tensor]](), set[int]()
    for token in sorted(range(len(row)), key=lambda token: -int(visible[token].sum())):
        if token in covered or row.trees[token] < 0:
            continue
        indices = visible[token].nonzero()[:, 0]
        new = torch.tensor([place for place, index in enumerate(indices.tolist()) if index not in covered])
        covered |= set(indices.tolist())
        paths.append((indices, new))
    return paths
