"""What the gap between engines and trainer is put down to."""

from dataclasses import replace

import numpy as np
import torch

from forge_rl.run.records.gap import explain
from forge_rl.types import Batch
from tests.fakes import packed, random_batch


def batch_of_sources() -> Batch:
    batch = random_batch(1, vocab=43, groups=2, turns=1)
    groups = [replace(g, task=replace(g.task, source=name)) for g, name in zip(batch.groups, "ab", strict=True)]
    return replace(batch, groups=tuple(groups))


def test_a_gap_is_found_where_it_was_put():
    laid = packed(batch_of_sources(), drop_uniform=False)
    scored = []
    for row in laid.rows:
        of_b = row.mask & (row.episodes >= 3)
        scored.append(row.behaviour + torch.where(of_b, 0.5, 0.001))
    lagging = [replace(row, versions=torch.where(row.mask, 3, -1).int()) for row in laid.rows]
    old = replace(laid, version=5, minibatches=(replace(laid.minibatches[0], rows=tuple(lagging)),))
    report = explain((laid, scored), (old, scored), [1e-7, 3e-6])
    groups = zip("ab", batch_of_sources().groups, strict=True)
    tokens = {name: sum(len(episode.turns[0].token_ids) for episode in group.episodes) for name, group in groups}
    assert [(row.name, row.tokens) for row in report.tables["source"]] == list(tokens.items())
    np.testing.assert_allclose([row.mean for row in report.tables["source"]], [0.001, 0.5], rtol=1e-4)
    assert report.fresh.tokens == sum(tokens.values())
    np.testing.assert_allclose(report.fresh.max, 0.5, rtol=1e-6)
    assert sum(row.tokens for row in report.tables["position"]) == report.fresh.tokens
    assert sum(row.tokens for row in report.tables["probability"]) == report.fresh.tokens
    assert [(row.name, row.tokens) for row in report.tables["lag"]] == [("2", report.fresh.tokens)]
    text = repr(report)
    assert "by source" in text
    assert text.index("3.00e-06") < text.index("1.00e-07"), "the worst layer comes first"


def test_experts_with_the_largest_gap_come_first():
    laid = packed(batch_of_sources(), drop_uniform=False, seq_len=256)
    (row,) = laid.rows
    experts = torch.zeros(len(row), 2, 1, dtype=torch.int16)
    experts[:, 1, 0] = torch.arange(len(row)) % 2
    routed = replace(row, routed=experts)
    scored = row.behaviour + torch.where(torch.arange(len(row)) % 2 == 1, 0.2, 0.0)
    wide = replace(laid, minibatches=(replace(laid.minibatches[0], rows=(routed,) * 8),))
    report = explain((wide, [scored] * 8), (wide, [scored] * 8), [])
    assert report.tables["expert"][0].name == "1 of layer 1"
