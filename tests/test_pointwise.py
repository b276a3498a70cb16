"""RMSNorm, SwiGLU and RoPE with gradients by hand, against torch's and torchtitan's own."""

import pytest
import torch

from forge_rl.engines.titan import cpu_feed_forward
from forge_rl.engines.titan.cpu_feed_forward import LeanFeedForward
from forge_rl.engines.titan.cpu_norm import LeanRMSNorm
from forge_rl.engines.titan.rope import HalfRoPE


def both(functions, *given: torch.Tensor) -> list[list[torch.Tensor]]:
    """Results of two functions of the same tensors, and the gradients of a weighted sum of each."""
    results_of = []
    for function in functions:
        inputs = [tensor.clone().requires_grad_() for tensor in given]
        results = function(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        total = sum(
            (tensor.float() * torch.linspace(-1, 2, tensor.numel()).view_as(tensor)).sum() for tensor in results
        )
        results_of.append([*results, *torch.autograd.grad(total, inputs)])
    return results_of


@pytest.mark.parametrize("shape", [(1, 5, 8), (1, 5, 3, 8), (7, 8)])
def test_a_norm_and_its_gradients_are_torchs(shape):
    from torchtitan.models.common import RMSNorm  # after ours, which tells it what the device is

    torch.manual_seed(0)
    norms = [kind(kind.Config(normalized_shape=8, eps=1e-2)) for kind in (RMSNorm, LeanRMSNorm)]
    x, weight = 3 * torch.randn(shape), torch.randn(8)

    def applied(norm):
        return lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, (x,))

    expected, results = both(map(applied, norms), x, weight)
    torch.testing.assert_close(results, expected)
    assert "_RMSNorm" in type(norms[1](x).grad_fn).__name__
    transposed = both(map(applied, norms), x.transpose(0, -2).contiguous().transpose(0, -2), weight)
    torch.testing.assert_close(transposed[1], expected)


def test_a_frozen_norm_gives_its_input_a_gradient_and_bfloat16_is_torchs():
    norm = LeanRMSNorm(LeanRMSNorm.Config(normalized_shape=8)).requires_grad_(False)
    torch.nn.init.ones_(norm.weight)
    x = torch.randn(3, 8, requires_grad=True)
    norm(x)[:, 0].sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert norm.weight.grad is None
    half = x.detach().bfloat16()
    assert torch.equal(norm.bfloat16()(half), torch.nn.functional.rms_norm(half, (8,), norm.weight, norm.eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_feed_forward_network_and_its_gradients_are_torchtitans(dtype, monkeypatch):
    from torchtitan.models.common.config_utils import make_ffn_config
    from torchtitan.models.common.feed_forward import FeedForward

    monkeypatch.setattr(cpu_feed_forward, "_CHUNK", 25)  # two rows of 12
    torch.manual_seed(0)
    config = make_ffn_config(dim=8, hidden_dim=12, w1_param_init=None, w2w3_param_init=None)
    parts = {"w1": config.w1, "w2": config.w2, "w3": config.w3}
    networks = [FeedForward(config).to(dtype), LeanFeedForward(LeanFeedForward.Config(**parts)).to(dtype)]
    names = [f"{name}.weight" for name in parts]
    weights = [torch.randn_like(networks[0].get_parameter(name)) for name in names]

    def applied(network):
        return lambda x, *given: torch.func.functional_call(network, dict(zip(names, given, strict=True)), (x,))

    expected, results = both(map(applied, networks), 2 * torch.randn(1, 5, 8, dtype=dtype), *weights)
    torch.testing.assert_close(results, expected)


def test_a_feed_forward_network_keeps_its_input_and_two_hidden_activations():
    from torchtitan.models.common.config_utils import make_ffn_config

    config = make_ffn_config(dim=8, hidden_dim=12, w1_param_init=None, w2w3_param_init=None)
    network = LeanFeedForward(LeanFeedForward.Config(w1=config.w1, w2=config.w2, w3=config.w3))
    weights = {weight.data_ptr() for weight in network.parameters()}
    sizes = dict[int, int]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = network(torch.randn(1, 5, 8, requires_grad=True))
    assert sorted(sizes.values()) == [5 * 8, 5 * 12, 5 * 12]
    out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_and_its_gradient_are_torchtitans(dtype):
    from torchtitan.models.common import CosSinRoPE

    torch.manual_seed(0)
    rope = HalfRoPE(HalfRoPE.Config(dim=8, max_seq_len=32))
    positions = torch.tensor([[0, 1, 2, 2, 3, 31]])
    query, key = (torch.randn(1, 6, heads, 8).to(dtype) for heads in (4, 2))
    cache = rope._reshape_cache(query, positions)
    functions = [lambda q, k, kind=kind: kind.apply_rotary_emb(q, k, cache) for kind in (CosSinRoPE, HalfRoPE)]
    expected, results = both(functions, query, key)
    assert [tensor.dtype for tensor in results] == [dtype] * 4
    torch.testing.assert_close(results, expected)
