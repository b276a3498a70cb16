"""Crafted training states: nothing that they name is run, and no file outside of their folder is read."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import CheckpointError
from tests.fakes import make_model


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._proof}",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, process_group: None) -> TitanEngine:
    return TitanEngine(model, TrainSettings(dtype="float32", seq_len=64, optimizer=OptimizerConfig()))


@pytest.fixture(scope="module")
def original(engine: TitanEngine, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for part in ("model", "training"):
        (folder / part).mkdir()
    engine.save(folder, model, version=1).result()
    engine.load_training_state(folder / "training")
    return folder / "training"


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """A training state that opens, for a test to make hostile."""
    return shutil.copytree(original, tmp_path / "training")


def change(folder: Path, edit: Callable[[Metadata], object]) -> None:
    """Edit an index as its owner would, or replace it by what `edit` returns."""
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    changed = edit(index)
    path.write_bytes(pickle.dumps(changed or index))


def append(folder: Path, value: object) -> tuple[int, int]:
    """Write a pickled value behind the tensors; returns where, and its bytes."""
    data = io.BytesIO()
    torch.save(value, data)
    with (folder / "__0_0.distcp").open("ab") as file:
        begin = file.tell()
        file.write(data.getvalue())
    return begin, len(data.getvalue())


def refused(engine: TitanEngine, folder: Path, because: str) -> None:
    with pytest.raises(CheckpointError, match=because) as caught:
        engine.load_training_state(folder)
    assert "delete that step's folder" in caught.value.hint
    assert not (folder / "proof").exists(), "the training state ran a command"


def test_an_index_that_is_a_command_is_refused(engine: TitanEngine, saved: Path):
    change(saved, lambda index: Evil(saved / "proof"))
    refused(engine, saved, "posix.system, which is no part of an index")


def test_an_index_with_a_command_among_its_fields_is_refused(engine: TitanEngine, saved: Path):
    change(saved, lambda index: setattr(index, "planner_data", Evil(saved / "proof")))
    refused(engine, saved, "posix.system")


def test_an_item_of_bytes_which_torch_would_unpickle_is_refused(engine: TitanEngine, saved: Path):
    begin, size = append(saved, Evil(saved / "proof"))

    def edit(index: Metadata) -> None:
        index.state_dict_metadata["steps"] = BytesStorageMetadata()
        place = index.storage_data.pop(MetadataIndex("steps", (), 0))
        place.offset, place.length = begin, size
        index.storage_data[MetadataIndex("steps")] = place

    change(saved, edit)
    refused(engine, saved, "BytesStorageMetadata, which is no part of an index")


def test_a_tensor_that_is_a_command_is_refused(engine: TitanEngine, saved: Path):
    begin, size = append(saved, Evil(saved / "proof"))

    def edit(index: Metadata) -> None:
        for place in index.storage_data.values():
            place.offset, place.length = begin, size

    change(saved, edit)
    refused(engine, saved, "Weights only load failed")


@pytest.mark.parametrize("path", ["../elsewhere", "{}/elsewhere", "..", "link", "pipe"])
def test_a_tensor_outside_of_the_folder_is_refused(path: str, engine: TitanEngine, saved: Path):
    shutil.copy(saved / "__0_0.distcp", saved.parent / "elsewhere")
    (saved / "link").symlink_to("../elsewhere")
    os.mkfifo(saved / "pipe")
    path = path.format(saved.parent)

    def edit(index: Metadata) -> None:
        for place in index.storage_data.values():
            place.relative_path = path

    change(saved, edit)
    refused(engine, saved, "is no file of its own in the folder")


def test_an_index_that_is_a_link_is_refused(engine: TitanEngine, saved: Path):
    (saved / ".metadata").rename(saved.parent / "index")
    (saved / ".metadata").symlink_to(saved.parent / "index")
    refused(engine, saved, "is no file of its own in the folder")


@pytest.mark.parametrize("value", [-1, 2**70, 1.5, "1", None])
@pytest.mark.parametrize("field", ["offset", "length"])
def test_a_place_that_is_no_whole_number_or_beyond_the_file_is_refused(
    value: object, field: str, engine: TitanEngine, saved: Path
):
    change(saved, lambda index: [setattr(place, field, value) for place in index.storage_data.values()] and None)
    refused(engine, saved, "cannot be read")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04" + b"(" * 10**5 + b".",
        b"\x80\x04" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
        b"\x80\x04\x8d" + b"\xff" * 8 + b".",
        b"\x80\x04Nr\xff\xff\xff\xff.",
        pickle.dumps({"state_dict_metadata": {}}),
        pickle.dumps(Metadata({}, storage_data={})),
    ],
    ids=["marks", "nested", "long text", "huge memo", "dict", "empty"],
)
def test_an_index_that_is_nonsense_is_refused(data: bytes, engine: TitanEngine, saved: Path):
    (saved / ".metadata").write_bytes(data)
    refused(engine, saved, "cannot be read")


def test_a_record_that_sets_attributes_of_a_class_is_refused(engine: TitanEngine, saved: Path):
    metadata = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    slots = b"N}\x8c\x08__init__N\x73\x86b."  # BUILD with (None, {"__init__": None}) on the class itself
    (saved / ".metadata").write_bytes(b"\x80\x04" + metadata + slots)
    refused(engine, saved, "cannot be read")
    assert Metadata({}).state_dict_metadata == {}
