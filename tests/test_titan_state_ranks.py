"""Training states, exports and versions of two ranks."""

import asyncio
import itertools
import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.ranks import run_ranks
from forge_rl.engines.families.llama import LLAMA
from forge_rl.engines.titan.export import Export
from forge_rl.errors import CheckpointError
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import complete, draft
from tests.fake_host import forget, reserve, transport
from tests.fakes import hf_weights, make_model
from tests.test_titan_state import engine_of, logits_of, read_whole, same, save, train, truncate

pytestmark = pytest.mark.usefixtures("process_group")

ODD: dict[str, object] = {
    "hidden_size": 25,
    "intermediate_size": 41,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
}


TwoRanks = tuple[Path, list[dict[str, Any]], dict[str, torch.Tensor]]


def exported(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights in the format in which a model's folder holds them."""
    return {name: tensor.float() for name, tensor in weights.items()}


def run_as_rank(rank: int, base: Path) -> dict[str, Any]:
    """Two steps in float64, publish and save; a third one. Then continue what one rank saved, try what is damaged."""
    results: dict[str, Any] = {}
    for name in ("untied", "tied"):
        engine = engine_of(base / "hf" / name, dtype="float64")
        train(engine, range(2), ranks=2)
        drafted = [draft(engine.specs(), version=2, dtype=torch.bfloat16)]
        if rank == 0:
            (base / "segments" / name).mkdir(parents=True)
            drafted = [reserve(drafted[0], base / "segments" / name)]
        torch.distributed.broadcast_object_list(drafted, src=0)
        reports = asyncio.run(transport().write(drafted[0], engine.local_shards(), rank=rank))
        hosts = ("a", "b")
        spread = draft(engine.specs(), version=2, dtype=torch.bfloat16, bucket_bytes=4096, hosts=hosts)
        shards = [replace(shard, values=shard.values.clone()) for shard in engine.shards_of_host(spread, hosts)]
        results[f"{name} of hosts"] = spread, shards
        published = hf_weights(engine.model)
        save(engine, base / "saved" / name, base / "hf" / name)
        train(engine, range(2, 3), ranks=2)
        results[name] = (reports, drafted[0], published, hf_weights(engine.model))
    engine = engine_of(base / "hf" / "untied", dtype="float64")
    engine.load_training_state(base / "saved" / "by_one" / "training")
    train(engine, range(1, 2), ranks=2)
    results["continued"] = (engine.updates, hf_weights(engine.model))
    try:
        engine.load_training_state(base / "saved" / "by_one" / "broken")
    except CheckpointError as error:
        results["refusal"] = error.message
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # its disk is full
    try:
        save(engine, base / "saved" / "full", base / "hf" / "untied")
    except CheckpointError as error:
        results["full"] = error.message
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    save(engine, base / "saved" / "freed", base / "hf" / "untied")
    results["freed"] = hf_weights(engine.model)
    return results


@pytest.fixture(scope="module")
def two_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> TwoRanks:
    """A folder with models and what one and two ranks saved of them; what each rank says; where one rank got to."""
    base = tmp_path_factory.mktemp("two_ranks")
    make_model(base / "hf" / "untied", "llama", **ODD)
    make_model(base / "hf" / "tied", "qwen3", tie_word_embeddings=True, **ODD)
    one_rank_engine = engine_of(base / "hf" / "untied", dtype="float64")
    train(one_rank_engine, range(1))
    save(one_rank_engine, base / "saved" / "by_one", base / "hf" / "untied")
    train(one_rank_engine, range(1, 2))
    shutil.copytree(base / "saved" / "by_one" / "training", base / "saved" / "by_one" / "broken")
    (data,) = (base / "saved" / "by_one" / "broken").glob("*.distcp")
    truncate(data)
    return base, run_ranks(run_as_rank, 2, base), hf_weights(one_rank_engine.model)


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_the_shards_of_two_ranks_make_a_whole_version(name: str, two_ranks: TwoRanks):
    _, ranks, _ = two_ranks
    assert all(rank[name][0] for rank in ranks), "a rank wrote nothing"
    manifest = complete(ranks[0][name][1], [rank[name][0] for rank in ranks])
    published = ranks[0][name][2]
    tensors = read_whole(manifest)
    forget(manifest)
    assert same(tensors, {name: tensor.bfloat16() for name, tensor in published.items()})
    assert all(entry.fingerprint == fingerprint(tensors[entry.name], entry.shape) for entry in manifest.tensors)
    assert ("lm_head.weight" in tensors) == (name == "untied")


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_ranks_of_two_hosts_bring_each_shard_to_its_tensors_writer(name: str, two_ranks: TwoRanks):
    _, ranks, _ = two_ranks
    tensors: dict[str, torch.Tensor] = {}
    for rank, host in enumerate("ab"):
        drafted, shards = ranks[rank][f"{name} of hosts"]
        mine = {bucket.key for bucket in drafted.buckets if bucket.host == host}
        assert mine
        entries = {entry.name: entry for entry in drafted.tensors}
        for name_of, shards_of_name in itertools.groupby(shards, key=lambda shard: shard.name):
            entry = entries[name_of]
            assert entry.bucket in mine
            tensor = tensors.setdefault(name_of, torch.full(entry.shape, torch.nan, dtype=entry.torch_dtype))
            for shard in shards_of_name:
                place = shard.tensor_slice.of(tensor)
                assert place.isnan().all(), "it comes once"
                place.copy_(shard.values)
    assert same(tensors, {name: tensor.bfloat16() for name, tensor in ranks[0][name][2].items()})


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_what_two_ranks_saved_one_rank_continues(name: str, two_ranks: TwoRanks):
    base, ranks, _ = two_ranks
    engine = engine_of(base / "hf" / name, dtype="float64")
    engine.load_training_state(base / "saved" / name / "training")
    assert engine.updates == 2
    assert same(hf_weights(engine.model), ranks[0][name][2])
    train(engine, range(2, 3))
    weights, expected = hf_weights(engine.model), ranks[0][name][3]
    assert max(float((weights[key] - expected[key]).abs().max()) for key in expected) < 1e-10
    assert max(float((weights[key] - ranks[0][name][2][key]).abs().max()) for key in expected) > 1e-3


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_what_two_ranks_exported_opens_in_transformers(name: str, two_ranks: TwoRanks):
    base, ranks, _ = two_ranks
    folder = base / "saved" / name / "model"
    assert same(load_file(folder / "model.safetensors"), exported(ranks[0][name][2]))
    assert logits_of(folder).isfinite().all()


def test_what_one_rank_saved_two_ranks_continue(two_ranks: TwoRanks):
    _, ranks, expected = two_ranks
    for rank in ranks:
        version, weights = rank["continued"]
        assert version == 2
        assert max(float((weights[key] - expected[key]).abs().max()) for key in expected) < 1e-10


def test_two_ranks_refuse_a_damaged_training_state(two_ranks: TwoRanks):
    _, ranks, _ = two_ranks
    for rank in ranks:
        assert "by_one/broken cannot be read" in rank["refusal"]


def test_one_ranks_full_disk_fails_all_and_the_next_save_is_whole(two_ranks: TwoRanks):
    base, ranks, _ = two_ranks
    for rank in ranks:
        assert "training state in" in rank["full"]
        assert "saved/full/training cannot be written: " in rank["full"]
    assert same(load_file(base / "saved" / "freed" / "model" / "model.safetensors"), exported(ranks[0]["freed"]))


def test_an_export_of_two_ranks_shards_opens_in_transformers(two_ranks: TwoRanks, tmp_path: Path):
    base, ranks, _ = two_ranks
    source = base / "hf" / "untied"
    (tmp_path / "many").mkdir()
    for rank in (1, 0):
        export = Export(
            base / "saved" / "untied" / "training", source, torch.bfloat16, LLAMA.names.parts, file_bytes=8192
        )
        export.write(tmp_path / "many", rank=rank, ranks=2)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert [path.name for path in files[:2]] == [f"model-0000{n}-of-0000{len(files)}.safetensors" for n in (1, 2)]
    files_tensors = [load_file(path) for path in files]
    assert all(len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 8192 for tensors in files_tensors)
    tensors = {name: tensor for tensors in files_tensors for name, tensor in tensors.items()}
    assert same(tensors, {name: tensor.bfloat16() for name, tensor in exported(ranks[0]["untied"][2]).items()})
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {name: file for file, tensors in zip(files, files_tensors, strict=True) for name in tensors} == {
        name: tmp_path / "many" / file for name, file in index["weight_map"].items()
    }
    assert logits_of(tmp_path / "many").isfinite().all()
