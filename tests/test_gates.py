"""Gates by advantage: which episodes and groups are left out, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from forge_rl.algorithms.gates import gate_advantages
from forge_rl.errors import ConfigError

ROWS = [[0.5, -0.2, 0.1, -0.5], [0.1, -0.1, 0.0, 0.05], [0.2, 0.0, 0.0, -0.2]]
BY_EPISODE = [[0.5, -0.2, 0.0, -0.5], [0.0] * 4, [0.2, 0.0, 0.0, -0.2]]
BY_GROUP = [ROWS[0], [0.0] * 4, ROWS[2]]


@pytest.mark.parametrize(("by", "expected"), [("episode", BY_EPISODE), ("group", BY_GROUP)])
def test_small_advantages_become_zero_by_episode_or_by_group(by: Any, expected: list[list[float]]) -> None:
    advantages = torch.tensor(ROWS)
    gated_advantages = gate_advantages(advantages, least=0.2, by=by)
    torch.testing.assert_close(gated_advantages, torch.tensor(expected), rtol=0, atol=0)
    assert advantages.tolist() == torch.tensor(ROWS).tolist()
    tokens = [[np.array([0.0, value, value / 2], np.float32) for value in row] for row in ROWS]
    gated = gate_advantages(tokens, least=float(np.float32(0.2)), by=by)
    assert [[float(values[1]) for values in row] for row in gated] == torch.tensor(expected).tolist()
    assert {values.dtype for row in gated for values in row} == {np.dtype(np.float32)}


def test_a_bound_of_zero_keeps_everything_and_tokens_may_be_none() -> None:
    torch.testing.assert_close(gate_advantages(torch.tensor(ROWS), least=0.0), torch.tensor(ROWS))
    [[empty]] = gate_advantages([[np.zeros(0, np.float32)]], least=0.1)
    assert len(empty) == 0


@pytest.mark.parametrize(
    "options", [{"least": -1.0}, {"least": float("nan")}, {"least": float("inf")}, {"least": 1.0, "by": "turn"}]
)
def test_a_gate_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="advantages are gated by"):
        gate_advantages(torch.tensor(ROWS), **options)
