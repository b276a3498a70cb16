"""A kernel that fails or is wrong on a GPU is named, and torch's own operations run in its place."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from forge_rl.algorithms import logprobs
from forge_rl.engines.devices import assumed_gpus
from forge_rl.engines.families import FAMILIES
from forge_rl.engines.families.family import Architecture
from forge_rl.engines.titan import block_kernels, kernel_checks, products, row_attention
from forge_rl.engines.titan.block_kernels import has_kernels
from forge_rl.engines.titan.gradient_sums import keeps_sums
from forge_rl.engines.titan.kernel_checks import check_kernels
from forge_rl.errors import ConfigError
from forge_rl.system import kernels
from forge_rl.system.kernels import EAGER, KERNELS, is_on

CPU = torch.device("cpu")


def small_architecture(head_dim: int = 24) -> Architecture:
    return Architecture(
        family=FAMILIES["qwen3"],
        dim=48,
        layers=1,
        heads=3,
        kv_heads=1,
        head_dim=head_dim,
        hidden_dim=40,
        vocab=43,
        norm_eps=1e-6,
        max_positions=64,
        rope={},
        tied=False,
    )


@pytest.fixture(autouse=True)
def all_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_FAILURES", {})
    monkeypatch.delenv(EAGER, raising=False)


def fake(monkeypatch: pytest.MonkeyPatch, forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Let SwiGLU's kernels be torch's operations, the forward one by a function."""

    def gradient(a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            return torch.cat(torch.autograd.grad(silu(a) * b, (a, b), grad), dim=-1)

    for module in (block_kernels, products):
        monkeypatch.setattr(module, "swiglu_values", forward)
        monkeypatch.setattr(module, "swiglu_gradient", gradient)


def shifted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return silu(a) * b.roll(1)


def broken(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.full_like(a, torch.nan)


def refused(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image is available\nfor this device")


@pytest.mark.parametrize(
    ("forward", "words"),
    [(shifted, "off by"), (broken, "off by nan"), (refused, "RuntimeError: no kernel image is available")],
)
def test_a_kernel_that_is_wrong_or_fails_is_off_and_named(
    forward: Callable[..., torch.Tensor],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake(monkeypatch, forward)
    with assumed_gpus(1, 80 << 30):
        values = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
        assert has_kernels(values, "swiglu")
        check_kernels(small_architecture(), torch.float32, CPU)
        assert not has_kernels(values, "swiglu")
    assert words in kernels.failures()["swiglu"]
    warning = next(line for line in capsys.readouterr().err.splitlines() if "'swiglu'" in line)
    assert words in warning


def test_a_right_kernel_stays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, lambda a, b: silu(a) * b)
    state = torch.get_rng_state()
    check_kernels(small_architecture(), torch.float32, CPU)
    assert is_on("swiglu")
    assert is_on("scores")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_gpu_that_no_longer_computes_ends_the_start_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, refused)
    monkeypatch.setattr(kernel_checks, "_works", lambda device: False)
    with pytest.raises(ConfigError, match="and the GPU with it") as failure:
        check_kernels(small_architecture(), torch.float32, CPU)
    assert f"{EAGER}=" in failure.value.hint


def test_the_user_turns_kernels_off_by_a_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
    monkeypatch.setenv(EAGER, "rope, norms")
    with assumed_gpus(1, 80 << 30):
        assert [name for name in KERNELS if not is_on(name)] == ["norms", "rope"]
        assert not has_kernels(values, "rope")
        assert has_kernels(values, "swiglu")
        assert logprobs.has_score_kernels(values)
        assert keeps_sums(values)
        monkeypatch.setenv(EAGER, "all")
        assert not any(map(is_on, KERNELS))
        assert not logprobs.has_score_kernels(values)
        assert not keeps_sums(values)
    check_kernels(small_architecture(), torch.float32, CPU)
    assert not kernels.failures(), "what is off is not checked"
    monkeypatch.setenv(EAGER, "rope,triton")
    with pytest.raises(ConfigError, match="triton"):
        is_on("rope")


def test_logits_whose_rows_are_not_contiguous_are_scored_without_kernels() -> None:
    logits = torch.empty(8, 4, device="meta")
    assert logprobs.has_score_kernels(logits)
    assert not logprobs.has_score_kernels(logits.t())


def by_sequence(q, k, v, ends, key_ends, longest, key_longest, **options):
    assert options.pop("window_size") == (-1, 0)
    slices = [slice(*pair) for pair in itertools.pairwise(ends.tolist())]
    parts = ([x[part].transpose(0, 1) for x in (q, k, v)] for part in slices)
    return torch.cat([scaled_dot_product_attention(*part, is_causal=True, **options).transpose(0, 1) for part in parts])


@pytest.mark.parametrize("is_right", [True, False])
def test_attention_is_held_to_causal_sequences(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def across(q, k, v, ends, *rest, **options):
        return by_sequence(q, k, v, ends[[0, -1]], *rest, **options)

    monkeypatch.setattr(row_attention, "varlen_attn", by_sequence if is_right else across)
    check_kernels(small_architecture(), torch.bfloat16, CPU)
    assert is_on("attention") is is_right
    assert is_on("head")
