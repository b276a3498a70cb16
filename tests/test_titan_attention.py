"""Attention over trees and in blocks, and the head in chunks, against the plain computation."""

from dataclasses import replace

import pytest
import torch

from forge_rl.algorithms.logprobs import Scoring, token_scores
from forge_rl.engines.titan import cpu_attention as attention
from forge_rl.engines.titan import head as titan_head
from forge_rl.engines.titan.cpu_attention import TreeAttention
from forge_rl.engines.titan.head import FloatHead
from forge_rl.engines.titan.masks import attention_mask
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout
from tests.dense_masks import dense_mask
from tests.fakes import empty_row, packed, random_batch

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("pad_multiple", [1, 64])
@pytest.mark.parametrize("mask_bytes", [1 << 20, 4 * 7 * 20])
def test_attention_by_tree_and_in_blocks_is_attention_under_the_whole_mask(
    pad_multiple: int, mask_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "MASK_BYTES", mask_bytes)
    laid = pack(
        batch := random_batch(0, vocab=43, groups=3),
        torch.ones(batch.rewards.shape),
        Layout(seq_len=1024, pad_multiple=pad_multiple),
        drop_uniform=False,
    )
    (row,) = laid.rows
    masks = attention_mask(row)
    trees = row.trees.tolist()
    assert [len(mask.until) for mask in masks] == [trees.count(tree) for tree in dict.fromkeys(trees)]
    assert len(masks) >= 3
    sizes = [bias.nbytes for mask in masks for _, _, bias in mask.blocks(torch.float32) if bias is not None]
    assert max(sizes) <= mask_bytes
    assert len(sizes) > 3 or mask_bytes > 1000
    generator = torch.Generator().manual_seed(0)
    results, expected = (
        [torch.randn(1, len(row), heads, 8, generator=generator.manual_seed(heads)) for heads in (4, 2, 2)]
        for _ in range(2)
    )
    for inputs in (results, expected):
        for x in inputs:
            x.requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in expected)
    attention_output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=dense_mask(row), enable_gqa=True
    )
    by_tree = TreeAttention(TreeAttention.Config())(*results, attention_masks=masks, enable_gqa=True)
    torch.testing.assert_close(by_tree, attention_output.transpose(1, 2))
    (by_tree.square().sum() + attention_output.square().sum()).backward()
    for mine, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_and_windows_over_trees_are_a_softmax_with_one_more_score(window: int | None):
    from torchtitan.models.gpt_oss.model import apply_attention_sink_rescale

    (row,) = packed(random_batch(0, vocab=43, groups=3), seq_len=1024).rows
    mask = dense_mask(row)
    if window is not None:
        mask &= row.positions[:, None] - row.positions < window
    torch.manual_seed(0)
    inputs = [3 * torch.randn(size, dtype=torch.float64) for size in ((1, len(row), n, 8) for n in (4, 2, 2))]
    inputs.append(3 * torch.randn(4, dtype=torch.float64))
    tree_inputs, expected = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    masks = attention_mask(row, window=4)
    family_mask = masks["basic_mask" if window is None else "sliding_window_mask"]
    sinks = tree_inputs.pop()
    attention = TreeAttention(TreeAttention.Config())(
        *tree_inputs,
        attention_masks=family_mask,
        scale=0.3,
        enable_gqa=True,
        out_transform=lambda out, sums: apply_attention_sink_rescale(out, sums, sinks),
    )
    tree_inputs.append(sinks)
    q, k, v, scores_of_sinks = expected
    k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bqnh,bknh->bnqk", q, k).mul(0.3).masked_fill(~mask, -torch.inf)
    column = scores_of_sinks[None, :, None, None].expand(1, 4, len(row), 1)
    shares = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    attention_output = torch.einsum("bnqk,bknh->bqnh", shares, v)
    torch.testing.assert_close(attention, attention_output)
    (attention.square().sum() + attention_output.square().sum()).backward()
    for mine, theirs in zip(tree_inputs, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("queries", [slice(0, 23), slice(20, 46), slice(46, 92), slice(91, 92)])
def test_attention_of_a_part_of_a_row_to_all_its_keys_is_that_of_the_whole(
    queries: slice, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "MASK_BYTES", 1400)
    trees = ([0] * 50, [1] * 30, [2] * 7, [-1] * 5)
    until = ([50] * 20, [30] * 10, [50] * 20, [80] * 30, [87] * 7, [92] * 5)
    row = replace(
        empty_row(),
        token_ids=torch.zeros(92),
        trees=torch.tensor([tree for part in trees for tree in part]),
        until=torch.tensor([end for part in until for end in part]),
    )
    q, k, v = (torch.randn(1, heads, 92, 8) for heads in (4, 2, 2))
    attention_output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=dense_mask(row), enable_gqa=True
    )
    part, _ = attention.attend_trees(q[:, :, queries], k, v, attention.tree_masks(row, queries), None)
    torch.testing.assert_close(part, attention_output[:, :, queries])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("queries", [slice(0, 90), slice(37, 90), slice(89, 90)])
def test_a_long_branch_is_split_for_all_threads_and_one_key_head_at_a_time(
    threads: int, heads: int, key_heads: int, queries: slice, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "_LEAST_BLOCK", 12)
    monkeypatch.setattr(attention, "_GROUP_BYTES", 90 * heads * 8 * 8 - 1)  # all 90 keys are too many
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    until = torch.tensor([90] * 90 + [95] * 5)
    row = replace(empty_row(), token_ids=torch.zeros(95), trees=(until > 90).int(), until=until)
    inputs = [torch.randn(1, h, 95, 8, dtype=torch.float64) for h in (heads, key_heads, key_heads)]
    split_inputs, expected = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    out, sums = attention.attend_trees(
        split_inputs[0][:, :, queries], *split_inputs[1:], attention.tree_masks(row, queries), scale=0.7
    )
    q, k, v = expected
    k, v = (x.repeat_interleave(heads // key_heads, dim=1) for x in (k, v))
    scores = (0.7 * q @ k.mT).masked_fill(~dense_mask(row), -torch.inf)[:, :, queries]
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(sums, scores.logsumexp(-1))
    ((scores.softmax(-1) @ v).square().sum() + scores.logsumexp(-1).square().sum()).backward()
    (out.square().sum() + sums.square().sum()).backward()
    for mine, theirs in zip(split_inputs, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("size", [4096, 6000])
def test_a_row_of_one_branch_has_no_mask_and_keeps_none(size: int):
    positions = torch.arange(size)

    def mask_of(*, branched: bool, window: int | None = None) -> attention.TreeMask:
        until = torch.full((size,), size, dtype=torch.int32)
        return attention.TreeMask(
            first=0, until=until, queries=size, branched=branched, positions=positions, window=window
        )

    mask = mask_of(branched=False, window=size)
    assert [bias for _, _, bias in mask.blocks(torch.float32)] == [None]
    assert all(bias is not None for *_, bias in mask_of(branched=False, window=size - 1).blocks(torch.float32))
    branched = mask_of(branched=True)
    biases = [bias for _, _, bias in branched.blocks(torch.float32) if bias is not None]
    assert sum(bias.numel() for bias in biases) < size * size * 0.8, "keys past a block are left out"
    assert branched._kept == {}


def test_a_chunked_head_gives_the_same_logprobs_and_gradients(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    head = FloatHead(FloatHead.Config(in_features=8, out_features=43)).double()
    hidden, targets = torch.randn(10, 8, dtype=torch.float64), torch.randint(0, 43, (10,))
    results, product = [], titan_head._product
    for chunk in (10, 4):
        monkeypatch.setattr(titan_head, "HEAD_CHUNK_BYTES", chunk * 43 * 4)
        head_input = hidden.clone().requires_grad_()
        sizes: list[int] = []
        monkeypatch.setattr(
            titan_head,
            "_product",
            lambda hidden, *args, sizes=sizes: sizes.append(len(hidden)) or product(hidden, *args),
        )
        logprobs, entropy, *_ = head(head_input, targets, Scoring(temperature=0.7))
        gradients = torch.autograd.grad(logprobs.exp().sum(), [head_input, head.weight])
        results.append((logprobs, entropy, *gradients))
        assert sizes == ([10] if chunk == 10 else [4, 4, 2, 2, 4, 4]), (
            "the backward pass computes chunks again, last first"
        )
    expected = token_scores(hidden @ head.weight.T, targets, Scoring(temperature=0.7))
    torch.testing.assert_close(results[0][:2], expected[:2])
    torch.testing.assert_close(results[1], results[0])


def test_chunks_of_a_bfloat16_head_add_up_as_exactly_as_one(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    head = FloatHead(FloatHead.Config(in_features=16, out_features=200)).to(torch.bfloat16)
    hidden, targets = torch.randn(2048, 16).bfloat16(), torch.randint(0, 200, (2048,))
    weight = head.weight.detach().double().requires_grad_()
    scores = (hidden.double() @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (exact,) = torch.autograd.grad((scores * torch.linspace(-1, 1, 2048)).sum(), weight)
    off = []
    for tokens in (2048, 16):
        monkeypatch.setattr(titan_head, "HEAD_CHUNK_BYTES", tokens * 200 * 4)
        logprobs, *_ = head(hidden, targets)
        (gradient,) = torch.autograd.grad((logprobs * torch.linspace(-1, 1, 2048)).sum(), head.weight)
        assert gradient.dtype == torch.bfloat16
        off.append(float((gradient - exact).norm() / exact.norm()))
    assert off[1] < 1.01 * off[0], "the gradient of all chunks is rounded once"
