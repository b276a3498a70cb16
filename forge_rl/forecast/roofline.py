"""Predicts seconds of decoding and training from a machine's rates: the slower of arithmetic and memory, plus links.

All functions are pure. Times are of one device type at the shares of its peak rates that `Efficiency` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from forge_rl.engines.context import sequence_bytes
from forge_rl.engines.costs import attention_flops, forward_flops, head_weights, layer_weights
from forge_rl.engines.device_types import DeviceType
from forge_rl.engines.families.family import Architecture
from forge_rl.engines.memory import adds_up_once
from forge_rl.engines.optimizer import moments_bytes
from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.protocol import DecodeSettings, TrainSettings
from forge_rl.engines.stage_plan import stage_layers
from forge_rl.errors import ConfigError
from forge_rl.forecast.lengths import longest_of, tail

_ADAMW_BYTES = 12
"""Bytes of float32 that AdamW reads (weight, gradient) and writes (weight) per weight, besides both moments."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Assumed shares of the peak rates, and costs that no rate explains."""

    training: float
    """Share of the peak FLOP/s in the trainer's passes, outside of attention."""
    attention: float
    """The same share for attention in the trainer, which needs three times the forward pass's FLOPs."""
    decoding: float
    """Share of the peak FLOP/s in an engine's steps, and while it reads prompts."""
    memory: float
    """Share of the memory's bandwidth."""
    links: float
    """Share of the bandwidth of each link."""
    filled: float
    """Share of the trainer's rows that holds tokens; the others are padding."""
    step_s: float
    """Seconds of an engine's step outside of the model: scheduling and sampling."""
    sequence_s: float
    """Seconds that each sequence adds to an engine's step: sampling and bookkeeping."""
    collective_s: float
    """Seconds until a collective of the smallest size ends."""


GPU_EFFICIENCY = Efficiency(
    training=0.34,
    attention=0.13,
    decoding=0.5,
    memory=0.7,
    links=0.7,
    filled=0.9,
    step_s=3e-3,
    sequence_s=1e-5,
    collective_s=2e-5,
)
"""Assumptions, except `training` and `attention`, which are of one measured update: 16,384 tokens of Qwen3-1.7B's
shapes in 0.8617 s on one H100, see docs/figures/gpu.md, of which FlexAttention took 0.36 s for 46 TFLOP, and 169 TFLOP
of products, with all that is between them, the rest. Larger matrices reach more."""
CPU_EFFICIENCY = Efficiency(
    training=0.83,
    attention=0.83,
    decoding=1.0,
    memory=1.0,
    links=1.0,
    filled=1.0,
    step_s=10e-3,
    sequence_s=1.2e-3,
    collective_s=1e-4,
)
"""Shares of the rates that `probe.this_device` measures; fitted to steps of SmolLM2-135M on an idle 2-core EPYC."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a step of a run computes."""

    groups: int
    """P: tasks per batch."""
    group_size: int
    """G: episodes per task."""
    prompt: float
    """Mean tokens of a prompt."""
    answer: float
    """Mean tokens of an answer."""
    longest: float
    """Maximum tokens of an answer; if it equals the mean, all answers have this length, else see `lengths`."""
    ahead: int = 0
    """Batches on which engines work ahead while one waits for its longest answers."""
    minibatches: int = 1
    epochs: int = 1
    passes: int = 0
    """Forward passes without gradient over the batch, such as a frozen reference's."""

    @property
    def episodes(self) -> int:
        return self.groups * self.group_size

    @property
    def answers(self) -> float:
        """Tokens that are generated and trained."""
        return self.episodes * self.answer

    @property
    def tokens(self) -> float:
        """Tokens in the trainer's rows: each group's prompt once, and all answers."""
        return self.groups * self.prompt + self.answers


@dataclass(frozen=True, kw_only=True)
class Times:
    """Predicted seconds of a phase by cause; causes that overlap are counted by the slower one."""

    parts: Mapping[str, float]
    sequences: float = 0.0
    """Requests that an engine decodes at a time."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def binds(self) -> str:
        """Name of the cause that takes the most time."""
        return max(self.parts, key=lambda name: self.parts[name])


def rollout_times(
    architecture: Architecture,
    settings: DecodeSettings,
    work: Workload,
    device: DeviceType,
    *,
    engines: int,
    cache_bytes: float,
    use: Efficiency,
) -> Times:
    """Predict the seconds that all engines take to generate a batch.

    A step reads the weights once for all requests, and each one's keys and values. Engines share a group's prompt.

    Args:
        settings: settings of each engine.
        engines: number of engines, with equal shares of the batch.
        cache_bytes: bytes of keys and values on each device of an engine.

    Raises:
        ConfigError: the cache does not hold one sequence.
    """
    a, tp, copies = architecture, settings.tensor_parallel_size, settings.data_parallel_size
    itemsize = resolve_dtype(settings.dtype).itemsize
    sequence_tokens = round(work.prompt + work.answer)
    cached_sequences = int(cache_bytes // sequence_bytes(a, settings, sequence_tokens))
    if cached_sequences < 1:
        raise ConfigError(
            f"an engine's {cache_bytes / 2**30:.3g} GiB hold no sequence of {sequence_tokens} tokens",
            hint="raise --generator.tensor-parallel-size, or lower --generator.max-model-len",
        )
    share = work.episodes / (engines * copies)
    # Limited by the engine's slots, by its cache, or by the answers that there are.
    running = max(1.0, min(settings.max_num_seqs, cached_sequences, share * (1 + work.ahead)))
    # The mean context of a decoded token: the prompt and half of the answer.
    context = round(work.prompt + work.answer / 2)
    step_flops, step_bytes = forward_flops(a, context, has_head=True), sequence_bytes(a, settings, context)
    arithmetic_s = memory_s = links_s = scheduling_s = 0.0
    for steps, decoded in _decoded(work, share, running):
        # The more tokens in a step, the more experts they reach, each of whose weights are read once.
        read_weights = layer_weights(a, max(1, round(decoded))) + head_weights(a)
        # Roofline of one step: weights are read once for all sequences, keys and values once for each. The slower of
        # arithmetic and memory counts, as they overlap.
        compute_s = decoded * step_flops / tp / (device.flops * use.decoding)
        read_s = (itemsize * read_weights / tp + decoded * step_bytes) / (device.bandwidth * use.memory)
        arithmetic_s += steps * compute_s if compute_s > read_s else 0.0
        memory_s += steps * read_s if compute_s <= read_s else 0.0
        scheduling_s += steps * (use.step_s + decoded * use.sequence_s)
        if tp > 1:
            # Two all-reduces a layer, after attention and after the feed-forward network; a ring sends 2 (tp - 1) / tp
            # of the bytes.
            sent_bytes = decoded * a.dim * itemsize * 2 * (tp - 1) / tp
            links_s += steps * 2 * a.layers * (use.collective_s + sent_bytes / (device.link * use.links))
    prompt_tokens = max(1.0, work.groups / (engines * copies)) * work.prompt
    # Each group's prompt is read once, without logits; its tokens see half of the prompt on average.
    prefill_flops = prompt_tokens * forward_flops(a, work.prompt / 2, has_head=False) / tp
    parts = {
        "arithmetic": arithmetic_s + prefill_flops / (device.flops * use.decoding),
        "memory bandwidth": memory_s,
        "links between the engine's devices": links_s,
        "scheduling and sampling": scheduling_s,
    }
    return Times(parts=parts, sequences=running)


def _decoded(work: Workload, share: float, running: float) -> Iterator[tuple[float, float]]:
    """Yield numbers of an engine's steps for its share of a batch, and of the answers that it decodes in each.

    Once the last answers have a slot, all answers under way are assumed to have as far to go as new ones, and the
    engine is assumed to have the longest answer of all engines. Engines that work ahead fill the tail of a batch with
    answers of the next batches, and the longest answer may take as many phases as there are batches under way.

    Args:
        share: answers of an engine.
        running: answers that it decodes at a time.
    """
    lengths = {"mean": work.answer, "longest": work.longest}
    if work.ahead:
        last = longest_of(work.episodes, **lengths)
        # Either all slots are always busy, or the longest answer of the batch decides.
        steps = max(share * work.answer / running, last / (1 + work.ahead))
        yield steps, share * work.answer / steps
        return
    if share > running:
        yield (share - running) * work.answer / running, running
    answers = min(share, running)
    yield from tail(answers, **lengths, last=longest_of(work.episodes * answers / share, **lengths))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How the trainer's ranks lie on hosts."""

    ranks: int
    per_host: int
    """Devices of a host."""
    sharers: int = 1
    """Processes that share what a `DeviceType` describes: on a CPU, the ranks."""

    def link(self, device: DeviceType, span: int) -> float:
        """Return the bytes per second of each rank to its peers, if a group of neighbours spans `span` ranks."""
        return device.link if span <= self.per_host else device.network


def train_times(
    architecture: Architecture,
    settings: TrainSettings,
    work: Workload,
    device: DeviceType,
    *,
    spread: Spread,
    use: Efficiency,
) -> Times:
    """Predict the seconds that the trainer takes to train on a batch.

    FSDP's collectives overlap with arithmetic; collectives of other kinds do not. With a pipeline, the times are
    the slowest stage's.
    """
    a, s = architecture, settings
    tp, cp, ep = s.tensor_parallel_degree, s.context_parallel_degree, s.expert_parallel_degree
    pp, stage_ranks = s.pipeline_parallel_degree, spread.ranks // s.pipeline_parallel_degree
    layers = stage_layers(a, pp)
    # The stage with the most layers is the slowest.
    stage_share = max(map(len, layers)) / a.layers
    itemsize = resolve_dtype(s.dtype).itemsize
    shares = max(1, stage_ranks // (tp * cp))
    episode_tokens = work.prompt + work.answer  # a group of episodes can be split, an episode cannot
    tokens = max(work.tokens / shares, episode_tokens) / use.filled
    row_tokens = max(1, s.seq_len) * cp
    # Ceiling division; a minibatch has at least one row.
    rows = max(float(work.minibatches), -(-tokens // row_tokens))
    products, attention = _flops(a, s, work)
    flops = products / use.training + attention / use.attention
    # A rank's part: its share of the tokens, padding included, of its stage's layers, split over tp and cp.
    flops *= stage_share * tokens / max(1.0, work.tokens) / (tp * cp)
    compute_s = spread.sharers * flops / device.flops
    parts = {"arithmetic": work.epochs * compute_s}
    if pp > 1:
        # The bubble of a pipeline of pp stages: (pp - 1) / rows of the passes, once for each minibatch.
        parts["filling and draining the pipeline"] = work.epochs * compute_s * work.minibatches * (pp - 1) / rows
    # Each row gathers the weights for its forward and its backward pass.
    gather_s = (
        stage_share
        * _gather_bytes(a, s, stage_ranks, rows, itemsize)
        / (spread.link(device, stage_ranks // s.data_parallel_replicate_degree) * use.links)
    )
    if s.enable_cpu_offload:
        # Float32 weights to the device and gradients back, for each row.
        gather_s += rows * 2 * 4 * a.weights / spread.ranks / (device.host_link * use.links)
    if s.enable_activation_offload:
        sent_bytes = stage_share * 2 * tokens / cp / tp * a.dim * itemsize * a.layers
        parts["links of offloaded activations"] = work.epochs * sent_bytes / (device.host_link * use.links)
    parts["links of FSDP beyond arithmetic"] = work.epochs * max(0.0, gather_s - compute_s)
    local_tokens = tokens / cp
    # Forward, backward, and forward again if all activations are recomputed.
    passes = 2 + (s.activation_checkpointing == "full")
    if tp > 1:
        # With sequence parallelism, a gather and a scatter around attention, and again around the feed-forward network.
        sent_bytes = stage_share * local_tokens * a.dim * itemsize * (tp - 1) / tp * a.layers * 4 * passes
        parts["links of tensor parallelism"] = work.epochs * sent_bytes / (spread.link(device, tp) * use.links)
    if cp > 1:
        kv_bytes = stage_share * tokens * (cp - 1) / cp * 2 * a.kv_heads * a.head_dim * itemsize / tp * a.layers
        parts["links of context parallelism"] = work.epochs * 3 * kv_bytes / (spread.link(device, tp * cp) * use.links)
    if ep > 1 and a.experts:
        # Each token goes to its top_k experts and comes back, in every layer with experts.
        routed_bytes = (
            stage_share * local_tokens / tp * a.experts.top_k * a.dim * itemsize * (ep - 1) / ep * len(a.experts.layers)
        )
        parts["links of expert parallelism"] = (
            work.epochs * 2 * passes * routed_bytes / (spread.link(device, ep) * use.links)
        )
    bytes_per_weight = _ADAMW_BYTES + 2 * moments_bytes(s.optimizer_state)
    state_bytes = bytes_per_weight * a.weights / (spread.ranks // s.data_parallel_replicate_degree)
    rate = device.host_link * use.links if s.enable_cpu_offload else device.bandwidth * use.memory
    parts["optimizer"] = spread.sharers * work.epochs * work.minibatches * state_bytes / rate
    return Times(parts=parts)


def _flops(architecture: Architecture, settings: TrainSettings, work: Workload) -> tuple[float, float]:
    """Return the operations of one pass over the batch, forward and backward, with recomputation: of products with
    weights, and of attention."""
    a = architecture
    # A multiply-add for each weight and token; logits only for answers, as prompts are not trained.
    layers = 2.0 * layer_weights(a) * work.tokens
    head = 2.0 * head_weights(a) * work.answers
    # A group's prompt is computed once; its tokens see half of it on average.
    prompts = work.groups * work.prompt * attention_flops(a, work.prompt / 2)
    attention = prompts + work.answers * attention_flops(a, work.prompt + work.answer / 2)
    recomputed = {"none": 0.0, "selective": 0.5, "full": 1.0}[settings.activation_checkpointing]
    # The backward pass costs two forward passes: gradients by inputs and by weights.
    passes = 3 + work.passes
    products = passes * (layers + head) + recomputed * layers
    return products, (passes + (recomputed == 1)) * attention


def _gather_bytes(a: Architecture, s: TrainSettings, ranks: int, rows: float, itemsize: int) -> float:
    """Return the bytes that one of `ranks` ranks that hold a model receives for FSDP in a pass over its rows: weights
    twice, float32 gradients once."""
    num_shards = ranks // s.data_parallel_replicate_degree
    if num_shards == 1:
        return 4.0 * a.weights if s.data_parallel_replicate_degree > 1 else 0.0
    local_weights = float(a.weights)
    if a.experts and s.expert_parallel_degree > 1:
        expert_weights = len(a.experts.layers) * a.experts.count * 3 * a.dim * a.experts.hidden_dim
        local_weights -= expert_weights * (1 - 1 / s.expert_parallel_degree)
    local_weights /= s.tensor_parallel_degree
    # Gradients are reduced with each row, or once a minibatch if they add up on each rank first.
    reductions = 1.0 if adds_up_once(a.weights, s, ranks=ranks * s.pipeline_parallel_degree) else rows
    return (2 * rows * itemsize * local_weights + reductions * 4 * local_weights) * (num_shards - 1) / num_shards
