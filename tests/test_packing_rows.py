"""Packing: how trees are laid out in rows of limited length, and shared among ranks."""

import pytest

from forge_rl.errors import ConfigError
from forge_rl.packing.rows import Layout
from tests.dense_masks import dense_mask
from tests.test_packing import batch_of, packed, simple


def test_a_tree_longer_than_a_row_is_split_and_its_prefix_copied():
    prompt = [*range(10, 20)]
    result = packed(batch_of(simple([[20, 21, 22, 23]] * 4, prompt)), Layout(seq_len=18))
    # prefix 9, branches of 4: two fit into 18
    assert [len(row) for row in result.rows] == [17, 17]
    assert all(row.token_ids[:9].tolist() == prompt[:9] for row in result.rows)
    assert result.trained_tokens == 16


def test_a_segment_longer_than_a_row_is_refused_with_flag_and_need():
    with pytest.raises(ConfigError) as error:
        packed(batch_of(simple([[20] * 8, [30]], [10, 11, 12])), Layout(seq_len=8, pad_multiple=4))
    assert "10 tokens" in error.value.message
    assert "seq_len is 8" in error.value.message
    assert "--trainer.seq-len to at least 12" in error.value.hint
    assert "--trainer.context-parallel-degree to at least 2" in error.value.hint


def test_a_split_row_holds_episodes_longer_than_one_devices_part():
    batch = batch_of(simple([[20] * 8, [30]], [10, 11, 12]))
    result = packed(batch, Layout(seq_len=8, context_parallel_degree=2, pad_multiple=4))
    assert [len(row) for row in result.rows] == [16], "each part is padded to a multiple of 4"
    (row,) = packed(batch, Layout(seq_len=8, context_parallel_degree=2, pad_multiple=4, tensor_parallel_degree=3)).rows
    assert len(row) == 24, "and to one of 3"
    with pytest.raises(ConfigError) as error:
        packed(batch, Layout(seq_len=4, context_parallel_degree=2, pad_multiple=4))
    assert "seq_len is 4 on each of 2 devices" in error.value.message
    assert "--trainer.seq-len to at least 8" in error.value.hint
    assert "--trainer.context-parallel-degree to at least 3" in error.value.hint


def test_a_segment_that_just_fits_is_packed():
    result = packed(batch_of(simple([[20] * 6, [30]], [10, 11, 12])), Layout(seq_len=8, pad_multiple=4))
    assert result.trained_tokens == 7


def test_rows_are_shared_out_evenly_by_splitting_trees():
    result = packed(batch_of(simple([[20] * 10] * 8, [10, 11])), Layout(shares=4))
    assert [len(row) for row in result.rows] == [21] * 4


def test_ranks_without_work_get_a_row_of_padding():
    result = packed(batch_of(simple([[20] * 3, [30] * 3], [10, 11])), Layout(shares=4, pad_multiple=2))
    assert sorted(len(row) for row in result.rows) == [2, 2, 4, 4]
    empty = [row for row in result.rows if not row.mask.any()]
    assert len(empty) == 2
    assert all(row.trees.tolist() == [-1, -1] for row in empty)
    assert all(dense_mask(row).diagonal().all() for row in empty)


def test_ranks_run_rows_of_about_equal_length_side_by_side():
    groups = [simple([[20] * (5 + 7 * p), [30] * (9 + 5 * p)], [10] * 9) for p in range(12)]
    result = packed(batch_of(*groups), Layout(shares=2, seq_len=180))
    loads = [sum(len(row) for row in result.rows[rank::2]) for rank in range(2)]
    assert max(loads) <= 1.1 * min(loads)
