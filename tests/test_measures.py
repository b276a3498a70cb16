"""What an update reads from the device at once, what it brings there at once, and what runs there beside it."""

import math

import pytest
import torch

from forge_rl.engines import platform
from forge_rl.engines.titan.measures import Measures
from forge_rl.engines.titan.rows import copied, on_device
from forge_rl.metrics import Max, Mean, Sum
from tests.fakes import packed, random_batch


def test_values_are_read_together_and_merged_without_those_of_nothing():
    measures = Measures()
    for total, count in ((3.0, 2), (1.0, 2)):
        measures.add("loss", Mean, torch.tensor(total), torch.tensor(count))
        measures.add("tokens", Sum, count)
        measures.add("gap/max", Max, torch.tensor(total))
    measures.add("drift", Mean, torch.tensor(0.0), torch.tensor(0))
    measures.add("drift/max", Max, torch.tensor(-math.inf))
    found, others = measures.read(torch.tensor(7.0, dtype=torch.bfloat16))
    assert found == {"loss": Mean(4, 4), "tokens": Sum(4), "gap/max": Max(3)}
    assert list(others) == [7]
    assert Measures().read() == ({}, [])


def test_a_row_is_copied_in_one_piece_and_knows_its_targets():
    (row,) = packed(random_batch(0, vocab=43)).rows
    tensors = row.tensors()
    found = copied(tensors, torch.device("cpu"))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in tensors.items())
    assert len({value.untyped_storage().data_ptr() for value in found.values()}) == 1
    own = slice(3, len(row) - 2)
    given = on_device(row, own, torch.device("cpu"))
    assert given.wanted.tolist() == row.mask[own].nonzero().flatten().tolist()
    assert given.tokens == int(row.mask.sum())


def test_threads_of_a_rank_work_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch):
    chosen: list[torch.device] = []
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with platform.device_threads(3, "save", 2) as threads:
        list(threads.map(len, ["a"]))
    assert set(chosen) == {torch.device("cuda", 3)}
