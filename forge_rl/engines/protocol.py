"""Interfaces of the engines: a `DecodeEngine` samples from the policy, a `TrainEngine` trains it.

A new backend is a folder next to `vllm/` and `titan/` that implements one of them, and a line in `factory.py`. It must
pass `tests/engine_conformance.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import tyro

from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.optimizer import OptimizerConfig, OptimizerState
from forge_rl.flags.categories import Operational, Tunable
from forge_rl.runtime.far_files import Folder
from forge_rl.token_arrays import Chunk, ScoredTokens, TokenIds
from forge_rl.types import Sampling
from forge_rl.weights.manifest import LoadReport, Manifest, ShardReport, TensorSpec

if TYPE_CHECKING:  # importing torch takes seconds, and a process that only holds settings does not need it
    import torch

    from forge_rl.algorithms.protocol import Loss
    from forge_rl.metrics import Value
    from forge_rl.packing.rows import Minibatch, Row
    from forge_rl.weights.transports.protocol import LocalShard, TensorBucket

Dtype = Literal["auto", "float32", "bfloat16"]
TrainDtype = Literal["auto", "float32", "bfloat16", "float64"]
Quantization = Literal["none", "fp8", "int8"]
LoadBalancer = Literal["auto", "none", "headtail", "ptrr"]
Modelling = Literal["auto", "native", "transformers"]
AppliedAdapters = Literal["merged", "served"]
_WHOLE_GPU = 0.9
"""Share of a GPU's memory that an engine takes if nothing else uses the GPU."""


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Settings of a decode engine."""

    dtype: Dtype = "auto"
    """Dtype of the engines' weights and activations. auto is bfloat16 on CUDA, float32 on CPU."""
    tensor_parallel_size: Operational[int] = 1
    """Devices that split each layer of an engine's model. Must divide the number of heads, and divide or be a multiple
    of the number of key heads."""
    data_parallel_size: Operational[int] = 1
    """Copies of the model in one engine, each on tensor_parallel_size devices; requests are spread over them."""
    enable_expert_parallel: Operational[bool] = False
    """Give each device of an engine whole experts instead of a part of each. For mixture-of-experts models."""
    max_model_len: Tunable[int] = 1024
    """Maximum tokens of a prompt and its completion together. If left out in a run, at most the model's positions, and
    on a GPU up to 4096 where a row of the trainer has room."""
    max_num_seqs: Operational[int] = 64
    """Maximum requests that each data_parallel_size copy of an engine decodes at a time; further ones wait."""
    kv_cache_gib: Operational[float] = 1.0
    """Size of an engine's KV cache on CPU, in GiB; on CUDA the cache takes what gpu_memory_utilization leaves."""
    gpu_memory_utilization: Operational[float] = 0.4
    """Share of a GPU's memory that an engine may take; trainer and engine may share a GPU."""
    routed_experts: bool = False
    """Return the experts that each token was routed to with each completion, for router replay in training."""
    speculation: str = "off"
    """Speculative decoding: tokens are drafted from the request's own text (ngram), also from other answers to the same
    prompt (suffix), or by a frozen smaller model (draft:MODEL), and verified several at a time; the sampled tokens stay
    the same. off, or KIND[:max_tokens=8,max_running=8,min_accepted=0.3,adaptive=true]."""
    kv_transfer_config: Operational[str] = ""
    """vLLM's config of KV transfer, as JSON: for a connector that offloads keys and values to host memory or a store.
    It must forget them when weights are loaded. Example: {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592}}."""
    enforce_eager: Operational[bool] = False
    """Disable compilation and CUDA graphs: starts sooner, decodes slower. Always the case on CPU."""
    batch_invariant: bool = False
    """Have each completion's logprobs not depend on what else an engine decodes at the time, by vLLM's batch-invariant
    kernels; slower. For CUDA, compute capability 8.0 or later."""
    quantization: Quantization = "none"
    """Format that engines round the weights of each version to when they load it: faster, and another policy than the
    trainer's. fp8: E4M3, with a scale for each output of a linear layer or expert matrix and each token's input. int8:
    of experts only, with a scale for each output. Embeddings and the head are not rounded. On CPU: fp8 alone, of models
    without experts."""
    adapters: Operational[AppliedAdapters] = "merged"
    """How engines apply the adapters of versions, with --lora.rank. merged: added to the base's weights, at no cost a
    token; a load clears the KV cache, and requests in flight go on with the new version. served: as vLLM's own LoRA
    over the base, loaded once; requests in flight keep the version and the KV cache that they began with."""
    max_loras: Operational[int] = 0
    """Maximum adapters that the requests of one step sample with; requests of further ones wait. Any number can be
    loaded. 0 serves no adapters."""
    max_lora_rank: Operational[int] = 16
    """Largest rank of adapters that engines serve. They reserve memory for it, rounded up to 1, 8, 16, 32, 64, 128,
    256, 320 or 512."""
    stall_s: Operational[float] = 180.0
    """Timeout for one step of an engine, including long prompts; an engine that exceeds it is replaced."""

    @property
    def gpu_share(self) -> float:
        """Share of a GPU's memory that an engine may take."""
        return self.gpu_memory_utilization or _WHOLE_GPU

    @property
    def devices(self) -> int:
        """Number of devices of an engine, each with one worker."""
        return self.tensor_parallel_size * self.data_parallel_size


class DecodeEngine(Protocol):
    """Decodes, and loads new weights while requests are in flight.

    engine = await start_decode_engine(folder, settings, seed=0)
    await engine.load(manifest, transport.fetch(manifest), reader="engine 0")
    async for chunk in engine.stream(prompt_ids, Sampling(max_tokens=64)):
        print(chunk.text, chunk.versions)
    """

    def stream(self, prompt_ids: TokenIds, sampling: Sampling, *, gather_s: float = 0.0) -> AsyncGenerator[Chunk, None]:
        """Decode one completion, yielding a chunk per step, or per `gather_s` seconds of steps; the last one at once.

        Closing the generator aborts the request.

        Each token comes with the logprob that it was sampled with (NaN at temperature 0: greedy completions are for
        evaluation) and the version that produced it. Only the last chunk has `finish` set, and `routed` if the
        settings ask for it.

        With a seed, each token depends on the seed, its position and the tokens before it alone, up to the rounding of
        logits. An engine whose prompt includes some of a completion's tokens draws the rest of the same completion.

        Raises:
            WeightsError: the last load failed.
            ConfigError: the engine rejects the request, or has no adapter of the name in `sampling`.
        """

    async def score(
        self,
        prompt_ids: TokenIds,
        token_ids: TokenIds,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        adapter: str = "",
    ) -> ScoredTokens:
        """Score given tokens after a prompt of at least one token, instead of sampling some.

        Logprobs are of logits divided by the temperature, exactly: normalised over the whole vocabulary. Nothing is
        read from the prefix cache, so that all are of the engine's current weights.

        Args:
            temperature: above 0.
            top_k: k, number of most likely tokens to return for each token; at most MOST_TOP.
            adapter: name of the loaded adapter to score with; empty for the engine's own weights.

        Raises:
            WeightsError: the last load failed.
            ConfigError: the engine rejects the request, or has no such adapter; prompt and tokens must be shorter than
                max_model_len.
        """

    async def hold(self, *, paused: bool, asleep: bool) -> bool:
        """Stop at a token boundary, or resume if both flags are False and the engine holds a whole version.

        A paused engine keeps its requests and their KV cache. An engine that is asleep also frees the KV cache and, on
        CUDA, the weights: loaded ones are dropped, the model folder's move to host memory. Its requests are prefilled
        again when it wakes.

        Returns:
            False if the weights were dropped: the engine decodes nothing until the next load.
        """

    async def serve_model(self) -> None:
        """Declare the weights that the engine started with to be version 0."""

    async def load(self, manifest: Manifest, buckets: AsyncIterator[TensorBucket], *, reader: str) -> LoadReport:
        """Load a published version of the weights.

        Requests in flight stop at a token boundary, keep their tokens, and continue on the new version; their KV cache
        is recomputed. With `adapters="served"`, a version with adapters of the base that is in place is a new adapter:
        requests in flight do not stop, and end with the version that they began with. A paused engine stays paused. If
        a load fails once begun, the engine serves nothing until another load succeeds.

        A bucket may be gone once the next one is requested. Error messages call this engine `reader`.

        Raises:
            WeightsError: a bucket is gone, or the version does not fit the model.
            AttestationError: the bytes read differ from the published ones.
        """

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter in PEFT's format, which acts on the engine's weights, whichever version they are.

        Requests name it in `Sampling.adapter`. If the name is loaded already, later requests sample with the new
        values, and those in flight keep the old ones. The files are read before this returns.

        Raises:
            ConfigError: the engine serves no adapters, or not this one: its rank, modules, shapes or values.
            ModelError: a file is missing or malformed, or the adapter is more than plain LoRA.
        """

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter if it is loaded. Requests that sample with it continue."""

    def close(self) -> None:
        """End the engine's processes."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a train engine."""

    dtype: TrainDtype = "auto"
    """Dtype of forward and backward. auto is bfloat16 on CUDA, float32 on CPU. Weights and optimizer state are float32,
    or float64 with float64, which is CPU only and meant for comparisons free of rounding. Versions are published as the
    passes see the weights: engines in float32 get rounded weights of a bfloat16 trainer."""
    modelling: Modelling = "auto"
    """Code that computes the model. native: torchtitan's, for the families that have it. transformers: transformers'
    own, for every causal language model with its attention interface, in fewer layouts. auto:
    native where there is one."""
    prefix_states: Operational[Literal["shared", "recomputed"]] = "shared"
    """How layers with a state (linear attention, state spaces) see a prefix that episodes of a row share. shared: its
    state is computed once and handed to each branch, level by level. recomputed: each branch computes it again, in one
    call for the whole row. Results are the same."""
    seq_len: Operational[int] = 1024
    """Maximum tokens of a packed row on one device; a row is one microbatch, and no episode is longer."""
    activation_checkpointing: Operational[Literal["none", "selective", "full"]] = "none"
    """Recompute activations in the backward pass to save memory. full keeps only each layer's input, for a third more
    compute; selective also keeps the results of attention and of every second matmul; none keeps all."""
    enable_activation_offload: Operational[bool] = False
    """Keep each layer's input in pinned host memory between forward and backward pass, for longer rows. Needs full
    activation checkpointing, and GPUs."""
    enable_cpu_offload: Operational[bool] = False
    """Keep weights, gradients and optimizer state in host memory and copy each layer to the GPU when needed (FSDP2's
    CPU offload). For models that do not fit: slower, and the optimizer runs on the CPU."""
    stays_on_device: Operational[bool] = False
    """Keep the trainer's state on a GPU that it shares with engines while they decode, instead of moving it to host
    memory each time. A run turns this on automatically where both fit."""
    frozen: tuple[str, ...] = ()
    """Weights not to train, as patterns of Hugging Face names such as "model.embed_tokens.*" "model.layers.[0-9].*".
    Frozen weights are published once."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    optimizer_state: OptimizerState = "float32"
    """Dtype of AdamW's two moments, which take 8, 4 or 2 bytes a weight. Those in bfloat16 are rounded stochastically;
    int8 is blockwise dynamic quantization. Both compute in float32, in a slower optimizer. Checkpoints hold the moments
    in float32."""
    tensor_parallel_degree: Operational[int] = 1
    """Ranks that split each matrix: its heads, hidden units and vocabulary. Must divide the model's heads and key
    heads."""
    context_parallel_degree: Operational[int] = 1
    """Ranks that split each row, which then has up to this many times seq_len: for episodes longer than one device
    can hold."""
    context_parallel_load_balancer: LoadBalancer = "auto"
    """How n context-parallel ranks split a row. none: in contiguous parts, of which the last usually has the most
    attention to compute. headtail: rank i has the parts i and 2n-1-i of 2n. ptrr: blocks of 128 tokens on GPUs, 1024 on
    CPU, are sorted by their work and dealt to the ranks. auto: for each row, whichever of the three leaves the heaviest
    rank the least work. Results are the same."""
    pipeline_parallel_degree: Operational[int] = 1
    """Stages that split the layers of the model, each on an equal part of the ranks: for models over several hosts, as
    stages exchange only rows' hidden states. Each stage waits for the others while a minibatch's first rows come and
    its last ones leave: with n stages, n - 1 of every rows + n - 1 steps. All ranks of a stage get the same rows, so
    each share needs many more rows than stages."""
    expert_parallel_degree: Operational[int] = 1
    """Ranks that split the experts of a mixture-of-experts model. No additional ranks are needed: it divides the same
    ranks as the other degrees."""
    expert_balance: Literal["plain", "least_loaded", "bias"] = "plain"
    """How expert-parallel ranks share uneven work. least_loaded: ranks with too many rows lend experts, so that all
    compute about as much; results equal plain's, where each rank computes its own experts. bias: after each
    update, DeepSeek-V3's biases in the choice of experts move by 0.001 towards even loads, which changes the policy."""
    data_parallel_replicate_degree: Operational[int] = 1
    """Copies of the policy, each sharded over its own part of the ranks (HSDP); 1 shards it over all."""
    router_replay: bool = False
    """Route each token to the experts that the engine chose for it, with gate weights from the trainer's own router.
    Without it, rounding routes some tokens differently, and their logprobs drift from the sampled ones. Has engines
    return the experts. For mixture-of-experts models. A frozen reference still makes its own choices."""
    lora: Annotated[LoRAConfig, tyro.conf.Fixed, tyro.conf.Suppress] = field(default_factory=LoRAConfig, repr=False)
    """Adapters to train instead of the weights; a run's `--lora` flags set it."""
    lora_seed: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = field(default=0, repr=False)
    """Seed of the adapters' first values and of dropout; a run's seed."""

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of parallelism by field name."""
        return {name: value for name, value in vars(self).items() if name.endswith("_degree")}

    @property
    def peers(self) -> int:
        """Number of ranks of a stage that train the same rows, each with its part of the matrices or of the row."""
        return self.tensor_parallel_degree * self.context_parallel_degree

    def share_of(self, rank: int, ranks: int) -> int:
        """Return the index of the data-parallel share whose rows one of `ranks` ranks trains."""
        return rank % (ranks // self.pipeline_parallel_degree) // self.peers

    def heads(self, ranks: int) -> range:
        """Return each share's first rank with the output head, which has the share's scores and metrics."""
        return range(ranks - ranks // self.pipeline_parallel_degree, ranks, self.peers)

    @property
    def longest_row(self) -> int:
        """Maximum tokens of a row over all ranks that split it."""
        return self.seq_len * self.context_parallel_degree


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """How to train on the minibatches of a batch; the same on all ranks.

    request = StepRequest(loss=ClippedSurrogate(), total_updates=100, version=3)
    """

    loss: Loss
    """Sums per-token losses."""
    epochs: int = 1
    """Number of updates on each minibatch."""
    temperature: float = 1.0
    """Sampling temperature of the episodes."""
    total_updates: int
    """Minibatches of the whole run, for the learning rate schedule."""
    version: int | None = None
    """Published version of the weights before the first update; None if they were updated since."""
    lr: float | None = None
    """Peak learning rate from now on; None leaves it unchanged."""
    scored_minibatches: int = 0
    """Number of minibatches, from the first on, whose rows are returned with scores."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Metrics and scores of a rank's updates on a batch."""

    metrics: list[dict[str, Value] | None]
    """Mergeable metrics of this share for each update, in order, the same on its peers; {} for a minibatch without
    rows. Stages without the output head have no metrics of rows. None for a non-finite gradient, which leaves weights
    and optimizer unchanged on all ranks and does not count in `updates`."""
    scores: list[torch.Tensor]
    """For each row of the scored minibatches `[L, 2]`, in host memory: the logprobs of its targets just before its
    first update, as `logprobs` returns them, and the entropies of their distributions in nats. Empty on stages without
    the output head."""


class TrainEngine(Protocol):
    """One rank's share of the policy, its optimizer and, optionally, a frozen reference.

        engine = make_train_engine(folder, settings)  # in each rank's process, after init_distributed
        result = engine.train_batch(minibatches, StepRequest(loss=loss, total_updates=100, version=3))
        reports = await transport.write(drafted, engine.local_shards(), rank=engine.rank)

    Every rank calls the same methods in the same order. Methods that need offloaded state bring it back first.
    """

    rank: int
    updates: int
    """Optimizer steps taken."""
    planned: int
    """Minibatches seen so far, including those that gave no update; the learning rate follows this count."""

    @property
    def parameters(self) -> int:
        """Number of the policy's parameters over all ranks."""

    def train_batch(
        self,
        minibatches: Sequence[Minibatch],
        request: StepRequest,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> StepResult:
        """Take an update on each minibatch, once per epoch: forward, backward, clip, optimizer step.

        Args:
            minibatches: rows of this rank's data-parallel share, the same on all its peers, each one microbatch; every
                share has the same number of minibatches. One without rows gives no update.
            progress: called after each microbatch with the number of those done and of all in this batch.

        Raises:
            LossError: the loss failed, on this rank or another. After any error, weights and optimizer are as the last
                update left them, and gradients are cleared.
        """

    def evaluate(self, minibatches: Sequence[Minibatch], loss: Loss) -> dict[str, Value]:
        """Compute the loss on minibatches as `train_batch` gets them, under the current weights, without an update.

        Returns:
            Mergeable metrics of this share: `loss`, `loss/NAME` for the loss's own, and `tokens/trained`; {} on stages
            without the output head.

        Raises:
            LossError: the loss failed, on this rank or another.
        """

    def logprobs(self, rows: Sequence[Row], *, temperature: float) -> list[torch.Tensor]:
        """Score the targets of this share's rows where the mask is True, under the current weights.

        Returns:
            A tensor `[L]` for each row, the same on its peers: position t scores `row.targets[t]`; 0 where the mask is
            False. Empty on stages without the output head, as `values` is.
        """

    def values(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Value the states before the targets of this share's rows, under the current weights of a value model.

        Returns:
            A tensor `[L]` for each row, the same on its peers: position t values the text up to token t, from which
            `row.targets[t]` was sampled; 0 where the mask is False. No sampling temperature applies.

        Raises:
            ConfigError: the model is a policy.
        """

    def layer_noise(self, rows: Sequence[Row], *, temperature: float, relative: float) -> list[tuple[float, int]]:
        """Measure how much the logprobs of this share's rows change if one layer's output is slightly off.

        Args:
            relative: error of each element, as a share of it, such as the epsilon of a dtype.

        Returns:
            For each layer, the sum of the absolute changes, and the number of targets; the same on the share's peers.
        """

    def offload(self) -> int:
        """Move weights, optimizer state and reference to host memory.

        Returns the number of bytes moved: 0 if they were offloaded already, or if the settings keep them on the device.
        """

    def onload(self) -> int:
        """Bring back the offloaded state, bit for bit.

        Returns the number of bytes moved; 0 if nothing was offloaded.

        Raises:
            ForgeError: the device is out of memory; the call can be retried.
        """

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the specs of all published tensors under Hugging Face names, the same on all ranks; a tied weight
        appears once."""

    def local_shards(self) -> Iterator[LocalShard]:
        """Yield this rank's part of the published tensors: views that, over all ranks, tile each weight exactly
        once."""

    def merged_reports(self, drafted: Manifest) -> list[ShardReport]:
        """Fingerprint this rank's slices of the weights that have adapters, with the adapters added, as readers of the
        version must hold them. Every rank calls this after the shards are written. Empty without adapters, or if whole
        weights are published."""

    def shards_of_host(self, drafted: Manifest, hosts: Sequence[str]) -> Iterable[LocalShard]:
        """Distribute the shards of all ranks so that each is on the host where its tensor's bucket is reserved; return
        this rank's.

        Args:
            drafted: manifest with the host of each bucket.
            hosts: host of each rank.
        """

    def save(self, folder: Folder, model: Path, *, version: int) -> Future[None]:
        """Start writing `folder/model` for Hugging Face and `folder/training` to resume from; both exist, empty.

        Waits for an earlier save, then copies the state, so that training may continue once this returns. The weights
        for Hugging Face are in the dtype of the forward pass (float32 with float64). Config and tokenizer are copied
        from `model`, the folder that the run started from; `version` is saved with the weights.

        Returns:
            A future, done when all ranks have written; raises CheckpointError if one failed.
        """

    def reset(self, optimizer: OptimizerConfig) -> None:
        """Return to the state before the first update, using the files of the model that the engine started with.

        A value head that is not in the files is 0 again; the reference, if any, is unchanged.

        Args:
            optimizer: settings of the optimizer from now on.

        Raises:
            ModelError: the files cannot be read any more.
        """

    def load_training_state(self, folder: Folder) -> int:
        """Resume from a folder `training` that `save` wrote; returns the version saved in it.

        Raises:
            CheckpointError: the checkpoint is incomplete, corrupt or of another model.
        """
