"""The trainer's model on CUDA, against the CPU's arithmetic on the same rows and weights."""

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from forge_rl.models.base_formats import BASE_FORMATS, BaseFormat, dequantize, quantize
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, Row
from tests.dense_masks import dense_mask
from tests.fakes import random_batch
from tests.test_kernel_checks import small_architecture


def head(dtype: torch.dtype) -> torch.nn.Module:
    from forge_rl.engines.titan.head import FloatHead

    torch.manual_seed(0)
    return FloatHead(FloatHead.Config(in_features=256, out_features=5000)).cuda().to(dtype)


def packed_row() -> Row:
    batch = random_batch(0, vocab=43, groups=3)
    layout = Layout(seq_len=1024, pad_multiple=128)
    return pack(batch, torch.ones(batch.rewards.shape), layout, drop_uniform=False).rows[0]


def on_gpu(row: Row) -> Row:
    return Row(**{name: value.cuda() for name, value in row.tensors().items()})  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [7, 3000])
def test_a_bfloat16_head_keeps_float32_sums(tokens: int):
    from forge_rl.algorithms.logprobs import Scoring, token_scores

    model = head(torch.bfloat16)
    hidden = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 5000, (tokens,), device="cuda")
    inputs, exact = (hidden.clone().requires_grad_() for _ in range(2))
    weight = model.weight.detach().clone().requires_grad_()
    logprobs, entropy, *_ = model(inputs, targets, Scoring(temperature=0.7))
    exact_scores = token_scores(linear(exact.double(), weight.double()).float(), targets, Scoring(temperature=0.7))
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, exact_scores[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(entropy, exact_scores[1], atol=1e-3, rtol=0)
    logprobs.sum().backward()
    exact_scores[0].sum().backward()
    for gradient, expected in ((inputs.grad, exact.grad), (model.weight.grad, weight.grad)):
        assert gradient is not None
        assert expected is not None
        torch.testing.assert_close(
            gradient.float(), expected.float(), rtol=0.05, atol=0.01 * float(expected.abs().max())
        )


@pytest.mark.parametrize("targets_each", [1, 3])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_scores_of_whole_vocabularies_are_those_of_float64(targets_each: int, entropy_gradient: bool):
    from forge_rl.algorithms.logprobs import Scoring, token_scores

    logits = 4 * torch.randn(300, 50_003, device="cuda")
    logits[1, 100:] = -torch.inf
    targets = torch.randint(0, 100, (300, targets_each), device="cuda")
    scoring = Scoring(temperature=0.7, entropy_gradient=entropy_gradient, squares=True)
    inputs, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    scores, expected = token_scores(inputs, targets, scoring), token_scores(exact, targets, scoring)
    for value, expected_value in zip(scores[:3], expected[:3], strict=True):
        torch.testing.assert_close(value, expected_value.float(), rtol=1e-5, atol=2e-5)
    for result in (scores, expected):
        (result.logprobs.sum() + (result.entropy.sum() if entropy_gradient else 0)).backward()
    torch.testing.assert_close(inputs.grad, exact.grad.float(), rtol=1e-4, atol=1e-5)


def test_many_targets_never_hold_all_logits(monkeypatch: pytest.MonkeyPatch):
    from forge_rl.engines.titan import head as titan_head

    monkeypatch.setattr(titan_head, "_MAX_CHUNK_BYTES", 256 << 20)
    model = head(torch.bfloat16)
    hidden = torch.randn(65536, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 5000, (65536,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(hidden, targets)[0].sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 65536 * 5000 * 4 / 2


def test_the_kernels_of_a_layer_agree_with_float64():
    from tests.test_block_kernels import check_kernels

    torch.manual_seed(0)
    with torch.device("cuda"):
        check_kernels()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_check_at_start_turns_off_no_kernel(dtype: torch.dtype):
    from forge_rl.engines.titan.kernel_checks import check_kernels
    from forge_rl.system.kernels import failures

    state = torch.cuda.get_rng_state()
    check_kernels(small_architecture(head_dim=64), dtype, torch.device("cuda"))
    assert not failures()
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_flash_attention_over_sequences_is_what_the_dense_mask_says():
    from forge_rl.engines.titan.row_attention import RowAttention, sequences
    from forge_rl.engines.titan.rows import on_device

    batch = random_batch(0, vocab=43, groups=3)
    layout = Layout(seq_len=1024, pad_multiple=128, share_prefixes=False)
    row = pack(batch, torch.ones(batch.rewards.shape), layout, drop_uniform=False).rows[0]
    assert sequences(row) is not None
    device_row = on_device(row, torch.arange(len(row)), torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(1, len(row), heads, 64, generator=generator).bfloat16() for heads in (4, 2, 2)]
    inputs = [x.cuda().requires_grad_() for x in values]
    out = RowAttention(RowAttention.Config())(*inputs, attention_masks=device_row.sequences, enable_gqa=True)
    exact = [x.double().requires_grad_() for x in values]
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in exact), attn_mask=dense_mask(row), enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0.02, atol=0.02)
    for result in (out, expected):
        result.sum().backward()
    for x, exact_input in zip(inputs, exact, strict=True):
        torch.testing.assert_close(x.grad.double().cpu(), exact_input.grad, rtol=0.05, atol=0.05)


def test_flex_attention_sees_what_the_dense_mask_says():
    from torchtitan.models.common.attention import FlexAttention

    from forge_rl.engines.titan.masks import attention_mask, compile_attention

    row = packed_row()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, len(row), 4, 64, generator=generator) for _ in range(3))
    inputs = [x.cuda().requires_grad_() for x in (q, k, v)]
    compile_attention()
    attention_output = FlexAttention(FlexAttention.Config())(*inputs, attention_masks=attention_mask(on_gpu(row)))
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in exact), attn_mask=dense_mask(row))
    real = row.trees >= 0
    torch.testing.assert_close(attention_output.cpu()[:, real], expected.transpose(1, 2)[:, real], atol=5e-3, rtol=1e-2)
    attention_output.cpu()[:, real].square().sum().backward()
    expected.transpose(1, 2)[:, real].square().sum().backward()
    for mine, theirs in zip(inputs, exact, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("base_format", BASE_FORMATS)
def test_a_quantized_base_has_the_bits_that_it_has_on_the_cpu(base_format: BaseFormat):
    """A trainer quantises on its GPU, and a merged folder is written on the CPU."""
    weight = torch.randn(500, 4100) * torch.logspace(-6, 3, 500)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        values = weight.to(dtype)
        stored = quantize(values, base_format)
        gpu_stored = quantize(values.cuda(), base_format)
        assert all(gpu_part.cpu().equal(part) for gpu_part, part in zip(gpu_stored, stored, strict=True))
        gpu_values = dequantize(*gpu_stored, 4100, base_format, dtype)
        assert gpu_values.cpu().equal(dequantize(*stored, 4100, base_format, dtype))
