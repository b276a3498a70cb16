"""What an update reads from the device at once, what it brings there at once, and what runs there beside it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from forge_rl.algorithms.logprobs import TokenScores
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines import platform
from forge_rl.engines.titan.measures import Measures, measure_tokens
from forge_rl.engines.titan.rows import copied, on_device
from forge_rl.engines.titan.update import Update
from forge_rl.metrics import EffectiveShare, Max, Mean, Sum, Tail, merge_all, reduce
from tests.fakes import packed, random_batch


def test_values_are_read_together_and_merged_without_those_of_nothing():
    measures = Measures()
    for total, count in ((3.0, 2), (1.0, 2)):
        measures.add("loss", Mean, torch.tensor(total), torch.tensor(count))
        measures.add("tokens", Sum, count)
        measures.add("gap/max", Max, torch.tensor(total))
    measures.add("drift", Mean, torch.tensor(0.0), torch.tensor(0))
    measures.add("drift/max", Max, torch.tensor(-math.inf))
    metrics, tensors = measures.read(torch.tensor(7.0, dtype=torch.bfloat16))
    assert metrics == {"loss": Mean(4, 4), "tokens": Sum(4), "gap/max": Max(3)}
    assert list(tensors) == [7]
    assert Measures().read() == ({}, [])


def test_a_row_is_copied_in_one_piece_and_knows_its_targets():
    (row,) = packed(random_batch(0, vocab=43)).rows
    tensors = row.tensors()
    host_tensors = copied(tensors, torch.device("cpu"))
    assert host_tensors.keys() == tensors.keys()
    assert all(
        torch.equal(host_tensors[name], value) and host_tensors[name].dtype == value.dtype
        for name, value in tensors.items()
    )
    assert len({value.untyped_storage().data_ptr() for value in host_tensors.values()}) == 1
    positions = torch.arange(len(row) - 2, 3, -1)
    device_row = on_device(row, positions, torch.device("cpu"))
    assert device_row.scored_indices.tolist() == row.mask[positions].nonzero().flatten().tolist()
    assert device_row.tokens == int(row.mask.sum())


def test_threads_of_a_rank_work_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch):
    devices: list[torch.device] = []
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with platform.device_threads("save", 2) as threads:
        list(threads.map(len, ["a"]))
    assert set(devices) == {torch.device("cuda", 3)}


def test_diagnostics_by_source_do_not_depend_on_the_layout_of_rows():
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(1, vocab=43, groups=4)
    sources = ("a", "b", "a", "c")
    named = [replace(g, task=replace(g.task, source=name)) for g, name in zip(batch.groups, sources, strict=True)]
    batch = replace(batch, groups=tuple(named))
    noise = {}  # by the token's place in the batch, so that it is the same in both layouts
    results, flat = [], []
    for seq_len in (256, 32):
        (minibatch,) = packed(batch, seq_len=seq_len).minibatches
        measures, update = Measures(), Update(minibatch=minibatch, loss=ClippedSurrogate())
        for index, row in enumerate(minibatch.rows):
            logprobs, positions = row.behaviour.clone(), row.mask.nonzero()[:, 0]
            for t in positions.tolist():
                key = (int(row.episodes[t]), int(row.segments[t]), int(row.positions[t]))
                if key not in noise:
                    noise[key] = torch.randn((), generator=generator).item()
                logprobs[t] += noise[key]
                if seq_len == 256:
                    flat.append((sources[key[0] // 3], noise[key]))
            scores = TokenScores(logprobs.where(row.mask, torch.nan), torch.full_like(logprobs, 0.5), None)
            inputs = update.inputs(index, row, scores, {})
            measure_tokens(inputs, len(positions), measures, version=5)
        results.append(reduce(measures.read()[0]))
    assert results[0] == pytest.approx(results[1])
    metrics = results[0]
    for ending, tokens in [
        ("", flat),
        *((f"/{name}", [token for token in flat if token[0] == name]) for name in "abc"),
    ]:
        x = np.array([value for _, value in tokens])
        r = np.exp(x)
        assert metrics[f"entropy{ending}"] == pytest.approx(0.5)
        # of the engine's policy from the current one, by tokens that the engine sampled
        for kind, expected in (("k1", -x), ("k2", x**2 / 2), ("k3", r - 1 - x)):
            assert metrics[f"kl_behaviour/{kind}{ending}"] == pytest.approx(np.mean(expected), rel=1e-5)
        assert metrics[f"ratio/ess{ending}"] == pytest.approx(r.sum() ** 2 / len(r) / (r**2).sum(), rel=1e-5)
        assert metrics[f"ratio/max{ending}"] == pytest.approx(np.exp(abs(x)).max(), rel=1e-5)
        nearest = np.quantile(abs(x), 0.99, method="inverted_cdf")
        assert nearest <= np.log(metrics[f"ratio/p99{ending}"]) <= nearest * 1.15


def test_tails_and_effective_shares_merge_and_nothing_has_none():
    tail = Tail(tuple([98.0, 0.0, 1.0, 1.0] + [0.0] * 124))
    assert merge_all([{"a": tail}, {"a": tail}]) == {"a": Tail(tuple(2 * count for count in tail.counts))}
    assert math.log(tail.percentile) == pytest.approx(1e-6 * math.exp(3 * Tail.STEP))
    assert math.isnan(Tail((0.0,) * 128).percentile)
    shares = [{"a": EffectiveShare(3.0, 5.0, 2.0)}, {"a": EffectiveShare(1.0, 1.0, 1.0)}]
    assert reduce(merge_all(shares)) == {"a": pytest.approx(16 / 18)}
