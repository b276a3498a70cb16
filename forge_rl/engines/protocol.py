"""Interfaces of the engines: a `DecodeEngine` samples from the policy, a `TrainEngine` trains it.

Another backend is one folder beside `vllm/` or `titan/` that implements one of them, and a line in `factory.py`. It
must pass `tests/engine_conformance.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.types import Chunk, Sampling, TokenIds
from forge_rl.weights.manifest import LoadReport, Manifest, TensorSpec

if TYPE_CHECKING:  # torch takes seconds, and a process that only holds settings needs none of it
    import torch

    from forge_rl.algorithms.losses import Loss
    from forge_rl.data.packing import Minibatch, Row
    from forge_rl.metrics import Value
    from forge_rl.weights.transports.protocol import LocalShard, TensorBucket

Dtype = Literal["auto", "float32", "bfloat16"]
TrainDtype = Literal["auto", "float32", "bfloat16", "float64"]


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Settings of a decode engine."""

    dtype: Dtype = "auto"
    """Format of the engines' weights and activations. auto is bfloat16 on CUDA, float32 on CPU."""
    tensor_parallel: int = 1
    """Devices that share each layer of an engine's model; must divide its heads, and its key heads, or the other way
    round."""
    data_parallel: int = 1
    """Copies of the model in one engine, each of tensor_parallel devices, between which it spreads its requests."""
    expert_parallel: bool = False
    """Give each device of an engine whole experts, instead of a part of each. For mixtures of experts."""
    max_model_tokens: int = 1024
    """Most tokens of a prompt and its completion together."""
    max_requests: int = 64
    """Most requests that one engine decodes at a time, on each of its data_parallel copies; more wait."""
    kv_cache_gib: float = 1.0
    """Memory for keys and values of an engine on CPU; on CUDA it takes what memory_share leaves."""
    memory_share: float = 0.4
    """Share of a GPU's memory that an engine may take; trainer and engine may live on the same GPU."""
    routed_experts: bool = False
    """Return which experts each token was routed to, with each completion, so that training can route it alike."""
    eager: bool = False
    """Do not compile and capture no CUDA graphs: starts sooner, decodes slower. Always so on CPU."""
    stall_s: float = 180.0
    """Longest time for one step of an engine, also with a long prompt; one that takes longer hangs, and is replaced."""

    @property
    def devices(self) -> int:
        """Number of devices of an engine, each with a worker."""
        return self.tensor_parallel * self.data_parallel


class DecodeEngine(Protocol):
    """Decodes, and takes new weights while requests are in flight.

    engine = await start_decode_engine(folder, settings, seed=0)
    await engine.load(manifest, transport.fetch(manifest), reader="engine 0")
    async for chunk in engine.stream(prompt_ids, Sampling(max_tokens=64)):
        print(chunk.text, chunk.versions)
    """

    def stream(self, prompt_ids: TokenIds, sampling: Sampling, *, gather_s: float = 0.0) -> AsyncGenerator[Chunk, None]:
        """Decode one completion, a chunk for each step, or for the steps of so many seconds; the last one at once.

        Closing the generator ends the request.

        Each token comes with the logprob that it was drawn with (NaN where temperature is 0: greedy completions are
        for evaluation) and with the version that produced it. The last chunk, and no other, has `finish` set, and
        `routed` where the settings ask for it.

        Raises:
            WeightsError: the last load failed.
            ConfigError: the engine does not take such a request.
        """

    async def hold(self, *, paused: bool, asleep: bool) -> bool:
        """Stop at a token boundary, or go on if neither is wanted and the engine holds a whole version.

        A paused engine keeps its requests with their keys and values. One that is asleep also gives memory back: keys
        and values, and on CUDA the weights; what it computed of its requests is computed again. Loaded weights are
        dropped; those of the model's folder go to the host.

        Returns:
            False if its weights were dropped: it decodes nothing until a load has brought them back.
        """

    async def serve_model(self) -> None:
        """Call the weights that the engine was started with version 0."""

    async def load(self, manifest: Manifest, buckets: AsyncIterator[TensorBucket], *, reader: str) -> LoadReport:
        """Replace the weights by those of a version.

        Requests in flight stop at a token boundary, keep their tokens, and go on under the new version; all that was
        computed from them with the old weights is computed again. A paused engine stays paused. When a load has begun
        and fails, the engine serves nothing until another one succeeds.

        A bucket may be gone as soon as the next one is asked for. Errors call this engine `reader`.

        Raises:
            WeightsError: a bucket is gone, or the version does not fit the model.
            AttestationError: what was read is not what was published.
        """

    def close(self) -> None:
        """End the engine's processes."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a train engine."""

    dtype: TrainDtype = "auto"
    """Format of forward and backward; weights and optimizer state are float32, or float64 with it. auto is bfloat16 on
    CUDA, float32 on CPU. float64, on CPU alone, is for comparisons that rounding must not blur."""
    row_tokens: int = 1024
    """Most tokens of a packed row that one device holds; a row is one microbatch, and no episode is longer."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward pass, to keep less until then: full keeps each layer's input
    alone, for a third more work; selective also keeps attention's and every second matrix product's result; none keeps
    all."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, and bring a layer's weights to the GPU when it needs
    them (FSDP2's own offload): for models that do not fit, at the price of copies and of an optimizer on the CPU."""
    frozen: tuple[str, ...] = ()
    """Weights that are not trained: patterns of Hugging Face names, such as "model.embed_tokens.*"
    "model.layers.[0-9].*". What is frozen is published once."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tensor_parallel: int = 1
    """Ranks that split each matrix: its heads, hidden units and vocabulary; must divide the model's heads and key
    heads."""
    context_parallel: int = 1
    """Ranks that split each row, which then has up to row_tokens times as many tokens: for episodes that are longer
    than what one device holds."""
    expert_parallel: int = 1
    """Ranks that split the experts of a mixture-of-experts model. They are no ranks of their own: those that share
    weights, rows and matrices also split the experts."""
    replicate: int = 1
    """Copies of the policy, each sharded over its own part of the ranks (HSDP), where 1 shards it over all."""
    router_replay: bool = False
    """Send each token to the experts that the engine chose for it (engines then return these), with the trainer's own
    weights of them. Else rounding has some tokens go elsewhere, and trained logprobs are not those that were sampled
    with. For mixtures of experts. A frozen reference chooses for itself: its weights are others."""

    @property
    def peers(self) -> int:
        """Number of ranks that train the same rows together, each its part of the model or of the row."""
        return self.tensor_parallel * self.context_parallel

    @property
    def longest_row(self) -> int:
        """Most tokens of a row, over the ranks that split it."""
        return self.row_tokens * self.context_parallel


class TrainEngine(Protocol):
    """One rank's share of the policy, its optimizer, and if asked for a frozen reference.

        engine = make_train_engine(folder, settings)  # in each rank's process, after init_distributed
        metrics = engine.train_batch(minibatches, loss, epochs=1, temperature=1.0, total_updates=100, version=3)
        reports = await transport.write(drafted, engine.local_shards(), rank=engine.rank)

    Every rank calls the same methods in the same order. What needs the state brings it back from host memory first.
    """

    rank: int
    updates: int
    """Optimizer steps behind the weights."""
    planned: int
    """Minibatches seen so far, also those that gave no update: by these the learning rate takes its course."""

    @property
    def parameters(self) -> int:
        """Number of the policy's parameters, over all ranks."""

    def train_batch(
        self,
        minibatches: Sequence[Minibatch],
        loss: Loss,
        *,
        epochs: int,
        temperature: float,
        total_updates: int,
        version: int | None,
    ) -> list[dict[str, Value] | None]:
        """Take an update on each minibatch, as often as there are epochs: forward, backward, clip, optimizer step.

        Args:
            minibatches: with the rows of this rank's data-parallel share, which are the same on all its peers, each
                one microbatch; as many in every share. One without rows gives no update.
            loss: sums per-token losses.
            temperature: the one that the episodes were sampled at.
            total_updates: minibatches of the whole run, for the course of the learning rate.
            version: published version that these weights are; None where they were updated since.

        Returns:
            Mergeable metrics of this share for each minibatch, in order, the same on its peers; {} for one without
            rows. None where the gradient was not finite: that left weights and optimizer as they were, on all ranks,
            and does not count in `updates`.

        Raises:
            LossError: the loss failed, on this rank or another. Whatever is raised leaves weights and optimizer as the
                last update left them, and no gradient.
        """

    def logprobs(self, rows: Sequence[Row], *, temperature: float) -> list[torch.Tensor]:
        """Score every masked target of this share's rows under the current weights.

        Returns:
            A tensor for each row, the same on its peers, `[L]`: position t scores `row.targets[t]`; 0 where the
            mask is False.
        """

    def offload(self) -> int:
        """Move weights, optimizer state and reference to host memory.

        Returns the bytes that left the device; 0 if they had left already.
        """

    def onload(self) -> int:
        """Bring back what `offload` moved, bit by bit the same.

        Returns the bytes that came back; 0 if nothing had left.

        Raises:
            ForgeError: the device has no room; it can be tried again.
        """

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor that is published, under Hugging Face names, the same on all ranks; a tied weight once."""

    def local_shards(self) -> Iterator[LocalShard]:
        """This rank's part of what is published: views that, with those of all ranks, tile each weight once."""

    def save(self, folder: Path, model: Path, *, version: int) -> Future[None]:
        """Begin to write `folder/model` for Hugging Face and `folder/training` to continue from; both exist, empty.

        The state is copied first, so that the engine may go on when this returns; what was begun before is finished
        before that. Config and tokenizer are copied from `model`, the folder that the run started from; `version` is
        kept beside the weights.

        Returns:
            A future, done when all ranks have written; it raises CheckpointError if one could not.
        """

    def load_training_state(self, folder: Path) -> int:
        """Continue from what `save` wrote into its folder `training`; returns the version that it was given.

        Raises:
            CheckpointError: it is incomplete, corrupt, or of another model.
        """
