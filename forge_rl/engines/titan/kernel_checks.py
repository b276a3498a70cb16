"""Compares the trainer's kernels with their formulas at start, so that one that fails on a GPU costs speed only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm, silu
from torchtitan.models.gpt_oss.moe import swiglu as clamped_formula

from forge_rl.algorithms.logprobs import Scoring, token_scores
from forge_rl.engines.families.family import Architecture, Experts
from forge_rl.engines.platform import release_memory
from forge_rl.engines.titan.block_kernels import add_norm, norm_rope, swiglu
from forge_rl.engines.titan.expert_choice import ChoiceRule, chosen_experts
from forge_rl.engines.titan.expert_products import expert_bias, expert_linear
from forge_rl.engines.titan.expert_rows import clamped_swiglu, places_of, spread_rows, weighted_sum
from forge_rl.engines.titan.fused_head import score_in_products
from forge_rl.engines.titan.head import score_in_chunks
from forge_rl.engines.titan.kernel_speed import turn_off_slow_kernels
from forge_rl.engines.titan.products import Heads, gated_network, gated_product, rotated_product
from forge_rl.engines.titan.row_attention import RowAttention, Sequences, takes_sequences
from forge_rl.errors import ConfigError
from forge_rl.system.kernels import EAGER, is_on, turn_off

_TOKENS = 640
"""More than the programs of any kernel, so that each has several tokens; a multiple of 16, for which Triton compiles
other programs."""
_ROWS = 16
"""Rows in checks that span a whole vocabulary, or a feed-forward network's width."""
_ATTENDED = 200
"""Tokens whose attention is computed densely."""
_EXPERT_ENDS = (_TOKENS // 3, _TOKENS // 3, _TOKENS)
"""Ends of the rows of three experts; the second has none."""
_HEAD_OUTPUTS = 4096
_TEMPERATURE = 0.7
Results = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """A kernel and its reference in PyTorch, as functions of the same inputs."""

    kernel: str
    """As in `system.kernels.KERNELS`."""
    function: Callable[..., Results]
    formula: Callable[..., Results]
    inputs: Results
    """Tensors that all get gradients; the formula gets them in float64."""
    tolerance: float
    """Maximum deviation, as a share of the largest absolute value of a result or gradient."""

    def failure(self) -> str:
        """Return how the kernel fails, in results or gradients; "" if it does not."""
        try:
            # The formula runs in float64, so the deviation is the kernel's own.
            results = _with_gradients(self.function, [x.detach().clone() for x in self.inputs])
            exact_results = _with_gradients(self.formula, [x.double() for x in self.inputs])
            shares = [_deviation(result, exact) for result, exact in zip(results, exact_results, strict=True)]
        except Exception as error:  # whatever it is, a compiler's or a driver's
            return f"{type(error).__name__}: {error}".splitlines()[0][:300]
        bad_shares = [share for share in shares if not share <= self.tolerance]  # NaN as well
        return f"a result is off by {max(bad_shares):.2g} of the largest value" if bad_shares else ""


def check_kernels(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
    """Run each kernel on random inputs with a model's own dimensions, and turn off those that fail or deviate.

    This compiles the very programs that the model's first step needs. The checks do not touch torch's random state.

    Args:
        dtype: of the activations.

    Raises:
        ConfigError: a kernel left the GPU unusable for this process, or EAGER names no kernel.
    """
    if dtype.itemsize > 4:  # which no kernel takes
        return
    for check in kernel_checks(architecture, dtype, device):
        if not is_on(check.kernel):
            continue
        if failure := check.failure():
            # After an illegal access, every later call on this device fails: nothing in this process can replace the
            # kernel.
            if not _works(device):
                raise ConfigError(
                    f"the kernel {check.kernel!r} failed, and the GPU with it: {failure}",
                    hint=f"set {EAGER}={check.kernel} to train without it",
                )
            turn_off(check.kernel, failure)
            print(
                f"forge_rl: the kernel {check.kernel!r} is off, and torch's own operations run in its place, which are "
                f"slower and take more memory: {failure}",
                file=sys.stderr,
                flush=True,
            )
    turn_off_slow_kernels(architecture, dtype, device)
    release_memory()


def kernel_checks(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> Iterator[KernelCheck]:
    """Return the checks of the kernels that a model in a dtype may use."""
    draw = _draws(dtype, device)
    yield from _score_checks(architecture, draw(_ROWS, architecture.vocab, kind=torch.float32) * 4)
    if dtype.itemsize < 4:
        outputs = min(_HEAD_OUTPUTS, architecture.vocab)
        # Spread over the vocabulary, so that every tile has some.
        targets = torch.arange(_TOKENS, device=device) * 7 % outputs
        yield KernelCheck(
            kernel="head",
            # Chunks that do not divide the tokens, so that the last one is shorter.
            function=lambda hidden, weight: score_in_chunks(hidden, weight, targets, _TOKENS // 3)[:1],
            formula=lambda hidden, weight: token_scores(hidden @ weight.t(), targets)[:1],
            inputs=(draw(_TOKENS, architecture.dim), draw(outputs, architecture.dim) * (2 * architecture.dim**-0.5)),
            tolerance=_tolerance(dtype),
        )
    if dtype.itemsize == 2:
        yield KernelCheck(
            kernel="logits",
            function=lambda hidden, weight: score_in_products(hidden, weight, targets, Scoring())[:1],
            formula=lambda hidden, weight: token_scores(hidden @ weight.t(), targets)[:1],
            inputs=(draw(_TOKENS, architecture.dim), draw(outputs, architecture.dim) * (2 * architecture.dim**-0.5)),
            tolerance=_tolerance(dtype),
        )
    if not architecture.family.general:  # transformers' code has its own layers
        yield from _layer_checks(architecture, dtype, device)


def _layer_checks(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> Iterator[KernelCheck]:
    draw, tolerance = _draws(dtype, device), _tolerance(dtype)
    dim, head_dim, eps = architecture.dim, architecture.head_dim, architecture.norm_eps
    yield KernelCheck(
        kernel="norms",
        function=lambda x, delta, weight: add_norm(x, delta, weight, eps),
        formula=lambda x, delta, weight: (x + delta, rms_norm(x + delta, (dim,), weight, eps)),
        inputs=(draw(1, _TOKENS, dim), draw(1, _TOKENS, dim), draw(dim)),
        tolerance=tolerance,
    )
    yield KernelCheck(
        kernel="norms",
        function=lambda x, weight: add_norm(x, None, weight, eps)[1:],
        formula=lambda x, weight: (rms_norm(x, (dim,), weight, eps),),
        inputs=(draw(1, _TOKENS, dim), draw(dim)),
        tolerance=tolerance,
    )
    if head_dim % 2 == 0:
        angles = draw(1, _TOKENS, 1, head_dim // 2, kind=torch.float32)
        cache = torch.cat([angles.cos(), angles.cos(), angles.sin(), angles.sin()], dim=-1)
        for heads in sorted({architecture.heads, architecture.kv_heads}):
            values = draw(1, _TOKENS, heads, head_dim)
            yield KernelCheck(
                kernel="rope",
                function=lambda x, weight, cache=cache: (norm_rope(x, weight, cache, eps),),
                formula=lambda x, weight, cache=cache: (_rotated(rms_norm(x, (head_dim,), weight, eps), cache),),
                inputs=(values, draw(head_dim)),
                tolerance=tolerance,
            )
            yield KernelCheck(
                kernel="rope",
                function=lambda x, cache=cache: (norm_rope(x, None, cache, 0.0),),
                formula=lambda x, cache=cache: (_rotated(x, cache),),
                inputs=(values,),
                tolerance=tolerance,
            )
    yield from _product_checks(architecture, draw, tolerance)
    if dtype.itemsize == 2:
        width = architecture.hidden_dim
        yield KernelCheck(
            kernel="products",
            function=lambda x, weight, down: (gated_network(x, weight, down),),
            formula=lambda x, weight, down: (
                (silu(x @ weight.chunk(2)[0].t()) * (x @ weight.chunk(2)[1].t())) @ down.t(),
            ),
            inputs=(
                draw(_TOKENS, dim),
                draw(2 * width, dim) * (2 * dim**-0.5),
                draw(dim, width) * width**-0.5,
            ),
            tolerance=tolerance,
        )
    yield KernelCheck(
        kernel="swiglu",
        function=lambda a, b: (swiglu(a, b),),
        formula=lambda a, b: (silu(a) * b,),
        inputs=(3 * draw(_ROWS, architecture.hidden_dim), draw(_ROWS, architecture.hidden_dim)),
        tolerance=tolerance,
    )
    if architecture.experts is not None:
        yield from _expert_checks(architecture.experts, architecture.dim, draw, tolerance)
    if takes_sequences(dtype, head_dim) and architecture.latent is None and architecture.window is None:
        ends = torch.tensor([0, _ATTENDED // 3, _ATTENDED], dtype=torch.int32, device=device)
        sequences = Sequences(ends, _ATTENDED - _ATTENDED // 3)
        attention = RowAttention(RowAttention.Config())
        kv_shape = 1, _ATTENDED, architecture.kv_heads, head_dim
        yield KernelCheck(
            kernel="attention",
            function=lambda q, k, v: (attention(q, k, v, attention_masks=sequences, enable_gqa=True),),
            formula=lambda q, k, v: (_attended(q, k, v, ends),),
            inputs=(draw(1, _ATTENDED, architecture.heads, head_dim), draw(*kv_shape), draw(*kv_shape)),
            tolerance=tolerance,
        )


def _expert_checks(
    experts: Experts, dim: int, draw: Callable[..., torch.Tensor], tolerance: float
) -> Iterator[KernelCheck]:
    """Check the way of tokens to their experts and back, and the activation of gpt-oss."""
    logits = draw(_ROWS, experts.count, kind=torch.float32)
    rule = ChoiceRule(experts.top_k, experts.score == "sigmoid", experts.normalized, experts.scale)
    yield KernelCheck(
        kernel="experts",
        function=lambda logits: chosen_experts(logits, None, rule)[:1],
        formula=lambda logits: (_expert_weights(logits, rule),),
        inputs=(logits,),
        tolerance=1e-4,
    )
    expert_ids = draw(_ROWS, experts.count, kind=torch.float32).topk(experts.top_k).indices
    scores = draw(_ROWS, experts.top_k, kind=torch.float32)
    places = places_of(expert_ids)
    rows = draw(_ROWS * experts.top_k, dim)
    yield KernelCheck(
        kernel="experts",
        function=lambda x: (spread_rows(x, places),),
        formula=lambda x: (x[places.flatten().argsort() // experts.top_k],),
        inputs=(draw(_ROWS, dim),),
        tolerance=tolerance,
    )
    yield KernelCheck(
        kernel="experts",
        function=lambda rows, scores: (weighted_sum(rows, scores, places),),
        formula=lambda rows, scores: ((rows[places] * scores[..., None]).sum(dim=1),),
        inputs=(rows, scores),
        tolerance=tolerance,
    )
    ends = torch.tensor(_EXPERT_ENDS, dtype=torch.int32, device=rows.device)
    row_experts = torch.searchsorted(ends, torch.arange(_TOKENS, device=rows.device), right=True)
    x, weight = draw(_TOKENS, dim), draw(len(ends), experts.hidden_dim, dim) * dim**-0.5
    if x.dtype.itemsize == 2:
        yield KernelCheck(
            kernel="expert_gradients",
            function=lambda x, weight: (expert_linear(x, weight, ends),),
            formula=lambda x, weight: (expert_linear(x, weight, ends),),
            inputs=(x, weight),
            tolerance=tolerance,
        )
    if (limit := experts.limit) is not None:
        yield KernelCheck(
            kernel="experts",
            # `expert_bias` works in place, which a leaf does not allow.
            function=lambda x, bias: (expert_bias(x * 1, bias, ends),),
            formula=lambda x, bias: (x + bias[row_experts],),
            inputs=(draw(_TOKENS, experts.hidden_dim), draw(len(ends), experts.hidden_dim)),
            tolerance=tolerance,
        )
        yield KernelCheck(
            kernel="experts",
            function=lambda hidden: (clamped_swiglu(hidden, limit),),
            formula=lambda hidden: (clamped_formula(hidden, limit=limit),),
            inputs=(3 * draw(_ROWS, 2 * experts.hidden_dim),),
            tolerance=tolerance,
        )


def _expert_weights(logits: torch.Tensor, rule: ChoiceRule) -> torch.Tensor:
    """Return the weights of `chosen_experts` without a bias."""
    scores = logits.sigmoid() if rule.is_sigmoid else logits.softmax(dim=-1)
    weights = scores.topk(rule.top_k, dim=-1).values
    return rule.scale * (weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) if rule.normalises else weights)


def _product_checks(
    architecture: Architecture, draw: Callable[..., torch.Tensor], tolerance: float
) -> Iterator[KernelCheck]:
    """Check products of several weights at once, with what follows them in the same operation."""
    dim, head_dim, eps = architecture.dim, architecture.head_dim, architecture.norm_eps
    scale = dim**-0.5
    if head_dim % 2 == 0:
        heads, kv_heads = architecture.heads, architecture.kv_heads
        counts = heads, kv_heads, kv_heads
        angles = draw(1, _TOKENS, 1, head_dim // 2, kind=torch.float32)
        cache = torch.cat([angles.cos(), angles.cos(), angles.sin(), angles.sin()], dim=-1)
        inputs = draw(1, _TOKENS, dim), draw(sum(counts) * head_dim, dim) * scale

        def rotated(x: torch.Tensor, weight: torch.Tensor, *norms: torch.Tensor) -> Results:
            weights = (norms[0], norms[1]) if norms else (None, None)
            return rotated_product(x, weight, weights, cache, Heads(heads, head_dim, eps))

        def formula(x: torch.Tensor, weight: torch.Tensor, *norms: torch.Tensor) -> Results:
            q, k, v = (x @ weight.t()).unflatten(-1, (-1, head_dim)).split(counts, dim=2)
            if norms:
                q, k = (rms_norm(part, (head_dim,), norm, eps) for part, norm in zip((q, k), norms, strict=True))
            return _rotated(q, cache), _rotated(k, cache), v

        # With and without norms: the latter frees the product, which is another path.
        for norms in ((draw(head_dim), draw(head_dim)), ()):
            yield KernelCheck(
                kernel="rope", function=rotated, formula=formula, inputs=(*inputs, *norms), tolerance=tolerance
            )
    yield KernelCheck(
        kernel="swiglu",
        function=lambda x, weight: (gated_product(x, weight),),
        formula=lambda x, weight: (silu(x @ weight.chunk(2)[0].t()) * (x @ weight.chunk(2)[1].t()),),
        inputs=(draw(_ROWS, dim), draw(2 * architecture.hidden_dim, dim) * (2 * scale)),
        tolerance=tolerance,
    )


def _draws(dtype: torch.dtype, device: torch.device) -> Callable[..., torch.Tensor]:
    """Return a function that draws normal tensors of a shape, the same on every device."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, kind)

    return draw


def _tolerance(dtype: torch.dtype) -> float:
    """Return the relative deviation to expect of results that were rounded a few times on the way."""
    return max(8 * torch.finfo(dtype).eps, 1e-4)


def _score_checks(architecture: Architecture, logits: torch.Tensor) -> Iterator[KernelCheck]:
    """Check scores with and without a gradient of the entropy; most tokens of one row are masked, and one is sure."""
    masked_from = max(1, architecture.vocab // 10)
    # Edge cases: a row of mostly masked logits, and one whose first token is almost certain.
    logits[1, masked_from:] = -torch.inf
    logits[2, 0] = 60.0
    targets = (torch.arange(2 * len(logits), device=logits.device) % masked_from).view(-1, 2)
    for entropy_gradient in (False, True):
        scoring = Scoring(temperature=_TEMPERATURE, entropy_gradient=entropy_gradient, squares=True)

        def scores(logits: torch.Tensor, scoring: Scoring = scoring) -> Results:
            logprobs, entropy, squares, _ = token_scores(logits, targets, scoring)
            assert squares is not None
            return logprobs, entropy, squares

        yield KernelCheck(kernel="scores", function=scores, formula=scores, inputs=(logits,), tolerance=1e-4)


def _with_gradients(function: Callable[..., Results], inputs: Results) -> Results:
    """Return a function's results, and the gradients by its inputs of their sum, weighted by fixed random numbers."""
    for x in inputs:
        x.requires_grad_()
    with torch.enable_grad():
        results = function(*inputs)
    traced_results = [result for result in results if result.requires_grad]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(result.shape, generator=generator).to(result) for result in traced_results]
    return [result.detach() for result in results] + list(torch.autograd.grad(traced_results, inputs, grads))


def _deviation(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference, as a share of the largest absolute value."""
    return float((result.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def _rotated(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    cos, sin = cache.double().split(x.shape[-1], dim=-1)
    rotated: torch.Tensor = x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
    return rotated


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Attend causally within sequences; all are [1, L, heads, head_dim]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    places = torch.arange(q.shape[1], device=q.device)
    sequence_ids = torch.bucketize(places, ends, right=True)
    is_seen = (sequence_ids[:, None] == sequence_ids) & (places[:, None] >= places)
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("bnqk,bknh->bqnh", weights, v)


def _works(device: torch.device) -> bool:
    """Return whether a device still computes; after a kernel's illegal memory access, none does."""
    try:
        return float(torch.ones(1, device=device).sum()) == 1
    except Exception:  # of the driver
        return False
