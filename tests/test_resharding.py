"""Resharding: what ranks of any trainer layout write, readers of any layout read, and only their part of it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from benchmarks.ranks import run_ranks
from forge_rl.engines.families import FAMILIES
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec, combine_shards, complete, draft
from forge_rl.weights.slices import TensorSlice, tiling_error
from tests.fake_host import forget, reserve, transport
from tests.read_slices import read_slices

RANKS = 4
BUCKET_BYTES = 4 << 10


@dataclass(frozen=True)
class Sizes:
    """A model of one dense and one MoE layer, or of dense layers only."""

    dim: int = 64
    hidden: int = 96
    vocab: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    experts: int = 4
    expert_hidden: int = 32


PLAIN = Sizes()
FEW_EXPERTS = Sizes(experts=2)
ODD = Sizes(dim=25, hidden=41, vocab=43, heads=5, kv_heads=1, head_dim=8, experts=0)
"""Nothing but the heads' dims can be halved."""


@dataclass(frozen=True)
class Layout:
    """Layout of a model over the trainer's ranks: degrees of torchtitan's axes, or plain PyTorch's TP under FSDP."""

    sizes: Sizes
    fsdp: int
    replicate: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    by_torch: bool = False
    """parallelize_module and fully_shard, which leave the norms on FSDP's slice of the mesh."""


LAYOUTS = {
    "fsdp4": Layout(PLAIN, fsdp=4),
    "replicate2_fsdp2": Layout(PLAIN, fsdp=2, replicate=2),
    "fsdp2_tp2": Layout(PLAIN, fsdp=2, tp=2),
    "fsdp2_ep2": Layout(PLAIN, fsdp=4, ep=2),
    "ep4": Layout(PLAIN, fsdp=4, ep=4),
    "ep2_fsdp2_within_experts": Layout(FEW_EXPERTS, fsdp=4, ep=2),
    "fsdp2_tp2_ep2": Layout(PLAIN, fsdp=2, tp=2, ep=2),
    "cp2_fsdp2": Layout(PLAIN, fsdp=2, cp=2),
    "cp2_fsdp2_by_torch": Layout(PLAIN, fsdp=2, cp=2, by_torch=True),
    "fsdp2_tp2_by_torch": Layout(PLAIN, fsdp=2, tp=2, by_torch=True),
    "odd_fsdp4": Layout(ODD, fsdp=4),
    "odd_fsdp2_tp2": Layout(ODD, fsdp=2, tp=2, by_torch=True),
}


def value_of(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Values of a torchtitan weight, float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def build(layout: Layout) -> nn.Module:
    """A torchtitan model with known weights, before it is shared."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    s = layout.sizes
    rope = CosSinRoPE.Config(dim=s.head_dim, max_seq_len=64)
    attention = {
        "n_layers": 1,
        "dim": s.dim,
        "n_heads": s.heads,
        "n_kv_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "fuse_qkv": False,
        "attn_backend": "flex",
        "rope": rope,
    }
    layers = qwen3._build_qwen3_layers(hidden_dim=s.hidden, **attention)
    if s.experts:
        layers += qwen3._build_qwen3_moe_layers(
            moe_hidden_dim=s.expert_hidden,
            num_experts=s.experts,
            top_k=2,
            moe_comm_backend="standard",
            **attention,
        )
        for layer in layers:
            if layer.moe is not None:
                layer.moe.load_balance_coeff = None  # as families build it
    config = qwen3.Qwen3Model.Config(
        vocab_size=s.vocab,
        dim=s.dim,
        norm=qwen3._qwen3_norm(s.dim),
        tok_embeddings=Embedding.Config(num_embeddings=s.vocab, embedding_dim=s.dim, param_init=qwen3._EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=s.dim, out_features=s.vocab, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=layout.ep > 1)
    model: nn.Module = config.build()
    model.names = FAMILIES["qwen3_moe"].names  # type: ignore[assignment]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(value_of(name, parameter.shape))
    return model


def share(model: nn.Module, layout: Layout) -> None:
    if layout.by_torch:
        share_by_torch(model, layout)
        return
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3

    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",
        data_parallel_replicate_degree=layout.replicate,
        data_parallel_shard_degree=layout.fsdp,
        context_parallel_degree=layout.cp,
        tensor_parallel_degree=layout.tp,
        expert_parallel_degree=layout.ep,
    )
    parallelize_qwen3(
        model,  # type: ignore[arg-type]
        parallel_dims=ParallelDims.from_config(parallelism, RANKS),
        training=TrainingConfig(seq_len=64, mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )


def share_by_torch(model: nn.Module, layout: Layout) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    other = "tp" if layout.tp > 1 else "cp"
    order = ("fsdp", "tp") if layout.tp > 1 else ("cp", "fsdp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=order)
    if other == "tp":
        parallelize_module(model, mesh["tp"], {"tok_embeddings": RowwiseParallel(), "lm_head": ColwiseParallel()})
        for layer in model.layers.values():  # type: ignore[union-attr, operator]
            plan = {f"attention.qkv_linear.w{projection}": ColwiseParallel() for projection in "qkv"}
            plan |= {"attention.wo": RowwiseParallel()}
            if hasattr(layer, "feed_forward") and layer.feed_forward is not None:
                plan |= {"feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel()}
                plan |= {"feed_forward.w2": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
    for layer in model.layers.values():  # type: ignore[union-attr, operator]
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])


@dataclass
class Written:
    """Reports of one rank for a layout."""

    specs: tuple[TensorSpec, ...]
    manifest: Manifest
    """The draft that all ranks wrote to."""
    reports: list[ShardReport]
    placements: set[str]
    copied: list[str]
    """Names of shards that do not share memory with the model."""
    misread: list[str]
    """Names of weights that changed when they were read from a Hugging Face folder."""


def write_as_rank(rank: int, folder: Path) -> dict[str, Written]:
    import forge_rl.engines.titan  # noqa: F401  sets torchtitan up for CPU
    from forge_rl.engines.titan.loading import load_weights
    from forge_rl.engines.titan.shards import local_shards, named_weights, specs, values_of

    results = {}
    for name, layout in LAYOUTS.items():
        model = build(layout)
        if rank == 0:
            (folder / name).mkdir()
            save_file(hf_state(model), folder / name / "model.safetensors")
        share(model, layout)
        drafted = [draft(specs(model), version=7, dtype=torch.bfloat16, bucket_bytes=BUCKET_BYTES)]
        if rank == 0:
            drafted = [reserve(drafted[0], folder / name)]
        dist.broadcast_object_list(drafted, src=0)
        shards = list(local_shards(model, range(dist.get_world_size())))
        reports = asyncio.run(transport().write(drafted[0], shards, rank=rank))
        weights = {ours: values_of(parameter).clone() for ours, parameter in named_weights(model)}
        for values in map(values_of, model.parameters()):
            values.zero_()
        load_weights(model, folder / name, tied=False)
        storages = {values_of(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}
        results[name] = Written(
            specs=specs(model),
            manifest=drafted[0],
            reports=reports,
            placements={str(getattr(parameter, "placements", ())) for parameter in model.parameters()},
            copied=[shard.name for shard in shards if shard.values.untyped_storage().data_ptr() not in storages],
            misread=[n for n, parameter in named_weights(model) if not torch.equal(values_of(parameter), weights[n])],
        )
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Written]]]:
    """Reports of each rank, by layout."""
    ranks = run_ranks(write_as_rank, RANKS, tmp_path_factory.mktemp("segments"))
    ranks_of = {name: [rank[name] for rank in ranks] for name in LAYOUTS}
    yield ranks_of
    for by_rank in ranks_of.values():
        forget(by_rank[0].manifest)


def hf_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights by Hugging Face's names, by torchtitan's own adapter."""
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    adapter = Qwen3StateDictAdapter(model.config, None)  # type: ignore[arg-type]
    return {name: tensor.contiguous() for name, tensor in adapter.to_hf(state).items()}


def published(layout: Layout) -> dict[str, torch.Tensor]:
    """Values that readers must find."""
    return {name: tensor.bfloat16() for name, tensor in hf_state(build(layout)).items()}


def test_the_ranks_agree_and_write_views(written: dict[str, list[Written]]):
    for ranks in written.values():
        assert all(rank.specs == ranks[0].specs for rank in ranks)
        assert all(spec.changed for spec in ranks[0].specs)
        assert not any(rank.copied for rank in ranks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_reads_its_block_of_a_hugging_face_folder(name: str, written: dict[str, list[Written]]):
    for rank in written[name]:
        assert not rank.misread


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_written_by_exactly_one_rank(name: str, written: dict[str, list[Written]]):
    reports = [report for rank in written[name] for report in rank.reports]
    for spec in written[name][0].specs:
        slices = [report.tensor_slice for report in reports if report.name == spec.name]
        assert tiling_error(spec.shape, slices) is None
        assert all(tensor_slice.numel for tensor_slice in slices)


def test_the_layouts_are_those_that_are_meant(written: dict[str, list[Written]]):
    expected = {
        "fsdp4": "(Shard(dim=0),)",
        "replicate2_fsdp2": "(Replicate(), Shard(dim=0))",
        "fsdp2_tp2": "(_StridedShard(dim=0, sf=2), Shard(dim=0))",
        "fsdp2_ep2": "(_StridedShard(dim=0, sf=2), Shard(dim=0))",
        "ep2_fsdp2_within_experts": "(Shard(dim=1), Shard(dim=0))",
        "fsdp2_tp2_ep2": "(Shard(dim=0), Shard(dim=1))",
        "cp2_fsdp2_by_torch": "(Shard(dim=0),)",
        "odd_fsdp2_tp2": "(_StridedShard(dim=0, sf=2), Shard(dim=0))",
    }
    for name, placements in expected.items():
        placements_of_ranks = set.union(*(rank.placements for rank in written[name]))
        assert placements in placements_of_ranks, (name, placements_of_ranks)


class Reader:
    """An engine's rank: fused and stacked parameters, and what it wants of each published tensor.

    qkv and gate-up are fused and cut by rows, the projections after them by columns, embeddings by rows; experts are
    stacked, gate and up fused. With too few key heads each rank has a copy. The rest is replicated.
    """

    def __init__(self, sizes: Sizes, whole: dict[str, torch.Tensor], *, tp: int, tp_rank: int, ep: int, ep_rank: int):
        self.wants: dict[str, TensorSlice] = {}
        self.places: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        self.expected: dict[str, torch.Tensor] = {}
        self._whole = whole
        self._tp, self._tp_rank = tp, tp_rank
        kv = 0 if sizes.kv_heads >= tp else None
        for name in ("model.embed_tokens", "lm_head"):
            self._fuse(name, [(f"{name}.weight", 0)])
        self._fuse("model.norm", [("model.norm.weight", None)])
        layers = sorted({int(name.split(".")[2]) for name in whole if name.startswith("model.layers.")})
        for layer in layers:
            prefix = f"model.layers.{layer}"
            projections = [
                (f"{prefix}.self_attn.{projection}_proj.weight", 0 if projection == "q" else kv) for projection in "qkv"
            ]
            self._fuse(f"{prefix}.qkv", projections)
            self._fuse(f"{prefix}.o", [(f"{prefix}.self_attn.o_proj.weight", 1)])
            for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
                self._fuse(f"{prefix}.{norm}", [(f"{prefix}.{norm}.weight", None)])
            if f"{prefix}.mlp.gate.weight" not in whole:
                self._fuse(
                    f"{prefix}.gate_up",
                    [(f"{prefix}.mlp.{projection}_proj.weight", 0) for projection in ("gate", "up")],
                )
                self._fuse(f"{prefix}.down", [(f"{prefix}.mlp.down_proj.weight", 1)])
                continue
            self._fuse(f"{prefix}.router", [(f"{prefix}.mlp.gate.weight", None)])
            experts = range(sizes.experts // ep * ep_rank, sizes.experts // ep * (ep_rank + 1))
            gate_up = [
                [(f"{prefix}.mlp.experts.{e}.{projection}_proj.weight", 0) for projection in ("gate", "up")]
                for e in experts
            ]
            self._stack(f"{prefix}.w13", gate_up)
            self._stack(f"{prefix}.w2", [[(f"{prefix}.mlp.experts.{e}.down_proj.weight", 1)] for e in experts])

    def _fuse(self, name: str, pieces: list[tuple[str, int | None]]) -> None:
        self._stack(name, [pieces])
        self.parameters[name] = self.parameters[name][0]
        self.expected[name] = self.expected[name][0]

    def _stack(self, name: str, rows: list[list[tuple[str, int | None]]]) -> None:
        """Make a parameter of one row for each expert, each row fused of pieces, each cut along a dim or whole."""
        slices = [[(piece, self._box(piece, dim)) for piece, dim in row] for row in rows]
        parts = [[tensor_slice.of(self._whole[piece]) for piece, tensor_slice in row] for row in slices]
        self.expected[name] = torch.stack([torch.cat(row) for row in parts])
        parameter = self.parameters[name] = torch.full_like(self.expected[name], float("nan"))
        for stacked, row in zip(parameter, slices, strict=True):
            offset = 0
            for piece, tensor_slice in row:
                self.wants[piece] = tensor_slice
                self.places[piece] = stacked[offset : offset + tensor_slice.size[0]]
                offset += tensor_slice.size[0]

    def _box(self, name: str, dim: int | None) -> TensorSlice:
        shape = self._whole[name].shape
        start, size = [0] * len(shape), list(shape)
        if dim is not None:
            rows_per_rank = -(-shape[dim] // self._tp)
            start[dim] = rows_per_rank * self._tp_rank
            size[dim] = min(rows_per_rank, shape[dim] - start[dim])
        return TensorSlice(start=tuple(start), size=tuple(size))


READERS = [
    pytest.param(name, tp, ep, id=f"{name}-to-{reader}")
    for name, layout in LAYOUTS.items()
    for reader, tp, ep in (("one_process", 1, 1), ("tp2", 2, 1), ("ep2", 1, 2))
    if ep == 1 or layout.sizes.experts
]


@pytest.mark.parametrize(("name", "tp", "ep"), READERS)
def test_each_reader_reads_its_part_and_nothing_else(name: str, tp: int, ep: int, written: dict[str, list[Written]]):
    manifest = complete(written[name][0].manifest, [rank.reports for rank in written[name]])
    full_weights = published(LAYOUTS[name])
    assert {entry.name: entry.shape for entry in manifest.tensors} == {
        n: tuple(t.shape) for n, t in full_weights.items()
    }
    reports = []
    for rank in range(tp * ep):
        reader = Reader(LAYOUTS[name].sizes, full_weights, tp=tp, tp_rank=rank % tp, ep=ep, ep_rank=rank % ep)
        reports += asyncio.run(read_slices(transport(), manifest, reader.wants, reader.places))
        for parameter, values in reader.parameters.items():
            assert torch.equal(values, reader.expected[parameter]), parameter
        needed_bytes = 2 * sum(tensor_slice.numel for tensor_slice in reader.wants.values())
        assert (needed_bytes < manifest.bytes) == (tp * ep > 1)
    assert combine_shards(reports, version=7) == {entry.name: entry.fingerprint for entry in manifest.tensors}
    for entry in manifest.tensors:
        assert entry.fingerprint == fingerprint(full_weights[entry.name], entry.shape), entry.name


def cut(rows: range, pieces: int, place: int) -> range:
    """One of the pieces that torch.chunk makes; empty where there are fewer."""
    chunks = torch.tensor(list(rows)).chunk(pieces) if rows else ()
    indices = chunks[place].tolist() if place < len(chunks) else []
    return range(indices[0], indices[-1] + 1) if indices else range(0)


@pytest.mark.parametrize(("fsdp", "tp"), [(2, 2), (3, 2), (2, 3), (4, 3), (3, 4)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 13, 14, 24])
def test_a_block_that_is_cut_twice_is_the_second_cut_of_the_first(rows: int, fsdp: int, tp: int):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    from forge_rl.engines.titan.shards import block

    placements = (_StridedShard(0, split_factor=tp), Shard(0))
    slices = []
    for fsdp_rank in range(fsdp):
        for tp_rank in range(tp):
            tensor_slice = block((rows, 4), (fsdp, tp), (fsdp_rank, tp_rank), placements)
            expected = cut(cut(range(rows), tp, tp_rank), fsdp, fsdp_rank)
            assert tensor_slice.size == (len(expected), 4)
            if expected:
                assert tensor_slice.start == (expected.start, 0)
            slices.append(tensor_slice)
    assert tiling_error((rows, 4), slices) is None
