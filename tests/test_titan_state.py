"""State: checkpoints continue exactly, exports open in transformers."""

import asyncio
import itertools
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.futures import Future

from forge_rl.engines.architecture import predicting_layers, read_architecture
from forge_rl.engines.families import FAMILIES
from forge_rl.engines.families.deepseek_v3 import DEEPSEEK_V3
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan import index as training_files
from forge_rl.engines.titan.blocks import Block, SavePlanner, copied
from forge_rl.engines.titan.export import Export
from forge_rl.engines.titan.shards import block
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import CheckpointError
from forge_rl.runtime.far_files import FolderServer
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import Manifest, complete, draft
from tests.fake_host import forget, reserve, transport
from tests.fakes import add_head, add_predicting_layer, hf_weights, make_model, packed, random_batch, train_batch
from tests.far_disk import answered
from tests.read_slices import read_version

pytestmark = pytest.mark.usefixtures("process_group")


def engine_of(folder: Path, **settings: Any) -> TitanEngine:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, decay="cosine")
    train_settings = {"dtype": "float32", "seq_len": 256, "optimizer": config, **settings}
    return TitanEngine(folder, TrainSettings(**train_settings))


def train(engine: TitanEngine, seeds: range, *, ranks: int = 1) -> None:
    for seed in seeds:
        train_batch(engine, packed(random_batch(seed, vocab=43), shares=ranks))


def save(engine: TitanEngine, folder: Path, model: Path) -> None:
    if engine.rank == 0:
        for part in ("model", "training"):
            (folder / part).mkdir(parents=True)
    torch.distributed.barrier()
    engine.save(folder, model, version=7).result()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def logits_of(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(torch.arange(20)[None]).logits[0]


def test_a_run_that_has_not_stepped_can_be_saved(tmp_path: Path):
    make_model(tmp_path / "hf")
    engine, resumed = engine_of(tmp_path / "hf"), engine_of(tmp_path / "hf")
    save(engine, tmp_path / "saved", tmp_path / "hf")
    resumed.load_training_state(tmp_path / "saved" / "training")
    for policy in (engine, resumed, fresh := engine_of(tmp_path / "hf")):
        train(policy, range(1))
    assert same(hf_weights(resumed.model), hf_weights(engine.model))
    assert same(hf_weights(fresh.model), hf_weights(engine.model)), "saving changed the run"


def test_a_run_is_saved_and_resumed_on_a_disk_that_it_reaches_by_requests(tmp_path: Path):
    make_model(tmp_path / "hf")
    engine = engine_of(tmp_path / "hf")
    train(engine, range(1))
    save(engine, tmp_path / "near", tmp_path / "hf")
    for part in ("model", "training"):
        (tmp_path / "far" / part).mkdir(parents=True)
    disk = FolderServer(tmp_path / "far")
    answered(disk, lambda folder: engine.save(folder, tmp_path / "hf", version=7).result())
    for part in ("model", "training"):
        near, far = (
            {path.name: path.read_bytes() for path in (tmp_path / on / part).iterdir()} for on in ("near", "far")
        )
        assert near.keys() == far.keys()
        assert part == "training" or near == far
    resumed = engine_of(tmp_path / "hf")
    training = FolderServer(tmp_path / "far" / "training", read_only=True)
    assert answered(training, resumed.load_training_state, max_requests=2000) == 7
    for policy in (engine, resumed):
        train(policy, range(1, 2))
    assert same(hf_weights(resumed.model), hf_weights(engine.model))
    (tmp_path / "far" / "training" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"/far cannot be read: '__0_0\.distcp' is missing, or not a regular"):
        answered(training, engine_of(tmp_path / "hf").load_training_state)
    shutil.rmtree(tmp_path / "far" / "training")
    with pytest.raises(CheckpointError, match=r"the training state in /far/training cannot be written: .*No such file"):
        answered(disk, lambda folder: engine.save(folder, tmp_path / "hf", version=7).result())


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_a_bfloat16_run_continues_bit_by_bit(family: str, tmp_path: Path):
    make_model(tmp_path / "hf", family)
    through = engine_of(tmp_path / "hf", dtype="bfloat16")
    train(through, range(1))
    save(through, tmp_path / "saved", tmp_path / "hf")
    resumed = engine_of(tmp_path / "hf", dtype="bfloat16")
    resumed.load_training_state(tmp_path / "saved" / "training")
    for policy in (through, resumed):
        train(policy, range(1, 2))
    assert same(hf_weights(resumed.model), hf_weights(through.model))
    first, current_weights = load_file(tmp_path / "hf" / "model.safetensors"), hf_weights(through.model)
    assert {name for name in current_weights if torch.equal(current_weights[name], first[name])} == {
        name for name in current_weights if name.endswith("e_score_correction_bias")
    }


def test_multi_token_prediction_layers_are_exported_unchanged(tmp_path: Path):
    source, parts = tmp_path / "hf", DEEPSEEK_V3.names.parts
    make_model(source, "deepseek_v3")
    layer_weights = add_predicting_layer(source)
    assert predicting_layers(source, read_architecture(source)) == read_architecture(source).predicting_layers == 1
    first = load_file(source / "model.safetensors")
    engine = engine_of(source, dtype="bfloat16")
    train(engine, range(1))
    save(engine, tmp_path / "saved", source)
    exported_tensors = load_file(tmp_path / "saved" / "model" / "model.safetensors")
    assert exported_tensors.keys() == first.keys()
    assert all(
        torch.equal(exported_tensors[name], layer_weights[name]) and exported_tensors[name].dtype == torch.float16
        for name in layer_weights
    )
    assert {
        name
        for name in exported_tensors.keys() - layer_weights
        if torch.equal(exported_tensors[name].float(), first[name])
    } <= {name for name in exported_tensors if name.endswith("e_score_correction_bias")}
    assert logits_of(tmp_path / "saved" / "model").isfinite().all()
    moved = source.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="hf holds no safetensors file") as caught:
        save(engine, tmp_path / "lost", source)
    assert f"put the run's model back to {source}" in caught.value.hint
    (tmp_path / "many").mkdir()
    Export(tmp_path / "saved" / "training", moved, torch.bfloat16, parts, file_bytes=8192).write(tmp_path / "many")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = {path.name: load_file(path) for path in (tmp_path / "many").glob("*.safetensors")}
    assert {name: file for file, tensors in shards.items() for name in tensors} == index["weight_map"]
    assert same({name: shards[file][name] for name, file in index["weight_map"].items()}, exported_tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in exported_tensors.values())


def test_a_large_state_is_written_and_read_in_several_threads_and_a_failure_of_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training_files, "_THREAD_BYTES", 4096)
    make_model(tmp_path / "hf")
    engine = engine_of(tmp_path / "hf")
    train(engine, range(1))
    save(engine, tmp_path / "saved", tmp_path / "hf")
    assert len(list((tmp_path / "saved" / "training").glob("*.distcp"))) == 4
    resumed, runs = engine_of(tmp_path / "hf"), list[int]()
    read = FileSystemReader.read_data

    def recorded(reader: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        runs.append(len(plan.items))
        return read(reader, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", recorded)
    resumed.load_training_state(tmp_path / "saved" / "training")
    assert len(runs) == 4
    assert min(runs) > 0
    assert same(hf_weights(resumed.model), hf_weights(engine.model))
    truncate(max((tmp_path / "saved" / "training").glob("*.distcp")))
    with pytest.raises(CheckpointError, match="cannot be read"):
        resumed.load_training_state(tmp_path / "saved" / "training")

    def write_files(**options: Any) -> None:
        if "_3" not in str(options["file_queue"].get_nowait()[0]):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(training_files, "_write_files_from_queue", write_files)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(engine, tmp_path / "full", tmp_path / "hf")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def overwrite(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize("damage", [truncate, empty, overwrite, Path.unlink])
@pytest.mark.parametrize("pattern", ["index.json", "*.distcp"])
def test_a_damaged_training_state_is_refused(damage: Any, pattern: str, tmp_path: Path):
    make_model(tmp_path / "hf")
    engine = engine_of(tmp_path / "hf")
    train(engine, range(1))
    save(engine, tmp_path / "saved", tmp_path / "hf")
    (path,) = (tmp_path / "saved" / "training").glob(pattern)
    damage(path)
    with pytest.raises(CheckpointError, match=f"training state in {tmp_path}/saved/training cannot be read") as caught:
        engine_of(tmp_path / "hf").load_training_state(tmp_path / "saved" / "training")
    assert "to resume from the one before" in caught.value.hint


@pytest.mark.parametrize("change", [{"num_hidden_layers": 3}, {"hidden_size": 16}])
def test_a_training_state_of_another_model_is_refused(change: dict, tmp_path: Path):
    make_model(tmp_path / "hf")
    save(engine_of(tmp_path / "hf"), tmp_path / "saved", tmp_path / "hf")
    make_model(tmp_path / "other", **change)
    with pytest.raises(CheckpointError, match="cannot be read"):
        engine_of(tmp_path / "other").load_training_state(tmp_path / "saved" / "training")


@pytest.mark.parametrize("head", ["untied", "tied", "tied, with a copy", "tied, with another"])
def test_an_export_opens_in_transformers_with_the_same_logits(head: str, tmp_path: Path):
    make_model(tmp_path / "hf", "qwen3", tie_word_embeddings=head != "untied")
    if "with" in head:
        add_head(tmp_path / "hf", equal=head == "tied, with a copy")
    assert read_architecture(tmp_path / "hf").untied_by_files == (head == "tied, with another")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "hf" / "chat_template.jinja").write_text("template")
    engine = engine_of(tmp_path / "hf")
    save(engine, tmp_path / "before", tmp_path / "hf")
    assert torch.equal(logits_of(tmp_path / "before" / "model"), logits_of(tmp_path / "hf"))
    train(engine, range(1))
    save(engine, tmp_path / "after", tmp_path / "hf")
    folder = tmp_path / "after" / "model"
    assert (logits_of(folder) - logits_of(tmp_path / "hf")).abs().max() > 1e-2
    assert same(load_file(folder / "model.safetensors"), hf_weights(engine.model))
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["tie_word_embeddings"] == (head in ("tied", "tied, with a copy"))
    assert (folder / "chat_template.jinja").read_text() == "template"
    reopened_engine = engine_of(folder)
    assert same(hf_weights(reopened_engine.model), hf_weights(engine.model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_has_the_dtype_that_was_evaluated(dtype: torch.dtype, tmp_path: Path):
    make_model(tmp_path / "hf").bfloat16().save_pretrained(tmp_path / "hf")
    name = str(dtype).removeprefix("torch.")
    engine = engine_of(tmp_path / "hf", dtype=name)
    train(engine, range(1))
    save(engine, tmp_path / "saved", tmp_path / "hf")
    weights = load_file(tmp_path / "saved" / "model" / "model.safetensors")
    assert same(weights, {name: tensor.to(dtype) for name, tensor in hf_weights(engine.model).items()})
    assert json.loads((tmp_path / "saved" / "model" / "config.json").read_text())["dtype"] == name


def test_an_export_of_a_spread_source_leaves_no_stale_index(tmp_path: Path):
    make_model(tmp_path / "hf").save_pretrained(tmp_path / "many", max_shard_size="8KB")
    save(engine_of(tmp_path / "many"), tmp_path / "saved", tmp_path / "many")
    assert not list((tmp_path / "saved" / "model").glob("*index*"))
    assert torch.equal(logits_of(tmp_path / "saved" / "model"), logits_of(tmp_path / "hf"))


def read_whole(manifest: Manifest) -> dict[str, torch.Tensor]:
    return asyncio.run(read_version(transport(), manifest))


def publish(engine: TitanEngine, folder: Path, base: Manifest | None = None) -> Manifest:
    """Publish by one rank."""
    drafted = draft(engine.specs(), version=engine.updates, dtype=torch.bfloat16, base=base)
    drafted = reserve(drafted, folder)
    return complete(drafted, [asyncio.run(transport().write(drafted, engine.local_shards(), rank=0))])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_publishes_is_its_folder(family: str, tmp_path: Path):
    make_model(tmp_path / "hf", family)
    (tmp_path / "segments").mkdir()
    manifest = publish(engine_of(tmp_path / "hf"), tmp_path / "segments")
    published_tensors = read_whole(manifest)
    forget(manifest)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    exact = {name for name in stored if name.endswith("e_score_correction_bias")}
    assert same(
        published_tensors, {name: tensor if name in exact else tensor.bfloat16() for name, tensor in stored.items()}
    )
    assert all(
        entry.fingerprint == fingerprint(published_tensors[entry.name], entry.shape) for entry in manifest.tensors
    )


def test_blocks_tile_a_weight_that_parallelism_cuts_unevenly():
    placements, mesh = (_StridedShard(0, split_factor=2), Shard(0)), (3, 2)
    plans = []
    for place in itertools.product(*map(range, mesh)):
        rank_slice = block((7, 4), mesh, place, placements)
        planner = SavePlanner()
        part = Block(shape=(7, 4), tensor_slice=rank_slice, values=torch.empty(rank_slice.size))
        planner.set_up_planner(copied({"w": part}))
        plans.append(planner.create_local_plan())
    _, index = SavePlanner().create_global_plan(plans)
    assert index.state_dict_metadata["w"].size == (7, 4)
    with pytest.raises(ValueError, match="validate"):
        SavePlanner().create_global_plan(plans[1:])


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path):
    make_model(tmp_path / "hf")
    engine, before = engine_of(tmp_path / "hf"), engine_of(tmp_path / "hf")
    for policy in (engine, before):
        train(policy, range(1))
    disk = threading.Event()
    engine._saver._thread.submit(disk.wait, 60)  # it is slow
    for part in ("model", "training"):
        (tmp_path / "saved" / part).mkdir(parents=True)
    saving = engine.save(tmp_path / "saved", tmp_path / "hf", version=1)
    train(engine, range(1, 2))
    assert not saving.done()
    disk.set()
    saving.result()
    resumed = engine_of(tmp_path / "hf")
    resumed.load_training_state(tmp_path / "saved" / "training")
    assert same(hf_weights(resumed.model), hf_weights(before.model)), "it is of when it was begun"
    assert same(load_file(tmp_path / "saved" / "model" / "model.safetensors"), hf_weights(before.model))
    train(resumed, range(1, 2))
    assert same(hf_weights(resumed.model), hf_weights(engine.model))


def test_a_run_continues_with_and_without_recomputing(tmp_path: Path):
    make_model(tmp_path / "hf")
    plain, recomputing = engine_of(tmp_path / "hf"), engine_of(tmp_path / "hf", activation_checkpointing="full")
    train(recomputing, range(1))
    save(recomputing, tmp_path / "saved", tmp_path / "hf")
    plain.load_training_state(tmp_path / "saved" / "training")
    assert same(hf_weights(plain.model), hf_weights(recomputing.model))


def test_a_training_state_that_cannot_be_written_is_an_error(tmp_path: Path):
    make_model(tmp_path / "hf")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/training cannot be written: .*Not a directory") as caught:
        engine_of(tmp_path / "hf").save(tmp_path / "file", tmp_path / "hf", version=0).result()
    assert "--out" in caught.value.hint
