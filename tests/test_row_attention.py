"""Rows of sequences go to FlashAttention, with the ends that say what the row's mask says; trees do not."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from forge_rl.engines.titan import row_attention
from forge_rl.engines.titan.row_attention import RowAttention, Sequences, sequences, takes_sequences
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, Row, attends
from tests.dense_masks import dense_mask
from tests.fakes import random_batch


def rows(*, share_prefixes: bool) -> list[Row]:
    batch = random_batch(0, vocab=43, groups=3)
    layout = Layout(seq_len=96, pad_multiple=32, share_prefixes=share_prefixes)
    return list(pack(batch, torch.ones(batch.rewards.shape), layout, drop_uniform=False).rows)


def visible(part: Sequences, size: int) -> torch.Tensor:
    """What causal attention within sequences sees, [L, L] bool."""
    number = torch.bucketize(torch.arange(size), part.ends[1:], right=True)
    index = torch.arange(size)
    return (number[:, None] == number[None]) & (index[None] <= index[:, None])


def test_a_row_without_shared_prefixes_is_its_sequences():
    for row in rows(share_prefixes=False):
        part = sequences(row)
        assert part is not None
        index = torch.arange(len(row))
        assert torch.equal(visible(part, len(row)), attends(row.until, index[:, None], index[None]))
        assert part.longest == int(part.ends.diff().max())
        assert part.ends.dtype == torch.int32


def test_a_row_of_trees_is_none():
    assert [sequences(row) for row in rows(share_prefixes=True) if len(row.until.unique()) > 2] != []
    assert all(sequences(row) is None for row in rows(share_prefixes=True))


def test_attention_over_sequences_is_what_the_dense_mask_says():
    def by_sequence(q, k, v, ends, key_ends, longest, key_longest, **options):
        assert options.pop("window_size") == (-1, 0)
        assert (longest, key_longest) == (int(ends.diff().max()),) * 2
        parts = []
        for first, end in zip(ends[:-1].tolist(), key_ends[1:].tolist(), strict=True):
            inputs = (x[first:end].transpose(0, 1) for x in (q, k, v))
            parts.append(scaled_dot_product_attention(*inputs, is_causal=True, **options).transpose(0, 1))
        return torch.cat(parts)

    row = rows(share_prefixes=False)[0]
    part = sequences(row)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, len(row), heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    with mock.patch.object(row_attention, "varlen_attn", by_sequence):
        out = RowAttention(RowAttention.Config())(q, k, v, attention_masks=part, scale=0.3, enable_gqa=True)
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=dense_mask(row), scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "is_taken"),
    [(torch.bfloat16, 128, True), (torch.float32, 128, False), (torch.bfloat16, 320, False)],
)
def test_flash_attention_takes_half_precision_and_common_heads(dtype: torch.dtype, head_dim: int, is_taken: bool):
    assert takes_sequences(dtype, head_dim) is is_taken


@pytest.mark.parametrize(("kind", "is_taken"), [("qwen3", True), ("gpt_oss", False), ("deepseek_v3", False)])
def test_models_with_sinks_or_latent_attention_keep_block_masks(kind: str, is_taken: bool, tmp_path: Path):
    from forge_rl.engines.architecture import read_architecture
    from forge_rl.engines.protocol import TrainSettings
    from forge_rl.engines.titan.model import build_model
    from forge_rl.engines.titan.scoring import RowScorer
    from tests.fakes import make_model

    make_model(tmp_path, kind)
    architecture, settings = read_architecture(tmp_path), TrainSettings(dtype="bfloat16", seq_len=64)
    with torch.device("meta"):
        model = build_model(architecture, settings)
    scorer = RowScorer(model, settings, mock.Mock(), window=architecture.window, device=torch.device("cpu"))
    assert scorer._takes_sequences is is_taken
