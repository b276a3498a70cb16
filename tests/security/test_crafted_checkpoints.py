"""Crafted training states: nothing that they name is run, and no file outside of their folder is read."""

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the pieces of all tensors in an index."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    for tensor in index.values():
        for piece in tensor["pieces"]:
            edit(piece)
    path.write_text(json.dumps(index))


def refused(engine: TitanEngine, folder: Path, because: str) -> None:
    with pytest.raises(CheckpointError, match=because) as caught:
        engine.load_training_state(folder)
    assert "delete that step's folder" in caught.value.hint
    assert not (folder / "proof").exists(), "the training state ran a command"


def test_a_tensor_that_is_a_command_is_refused(engine: TitanEngine, saved: Path):
    data = io.BytesIO()
    torch.save(Evil(saved / "proof"), data)
    with (saved / "__0_0.distcp").open("ab") as file:
        begin = file.tell()
        file.write(data.getvalue())
    change(saved, lambda piece: piece.update(offset=begin, length=len(data.getvalue())))
    refused(engine, saved, "Weights only load failed")


@pytest.mark.parametrize("path", ["../elsewhere", "{}/elsewhere", "..", "link", "pipe"])
def test_a_tensor_outside_of_the_folder_is_refused(path: str, engine: TitanEngine, saved: Path):
    shutil.copy(saved / "__0_0.distcp", saved.parent / "elsewhere")
    (saved / "link").symlink_to("../elsewhere")
    os.mkfifo(saved / "pipe")
    change(saved, lambda piece: piece.update(file=path.format(saved.parent)))
    refused(engine, saved, "is missing, or not a regular file of the folder")


def test_an_index_that_is_a_link_is_refused(engine: TitanEngine, saved: Path):
    (saved / "index.json").rename(saved.parent / "index")
    (saved / "index.json").symlink_to(saved.parent / "index")
    refused(engine, saved, "is missing, or not a regular file of the folder")


@pytest.mark.parametrize("value", [-1, 2**70, 1.5, "1", None])
@pytest.mark.parametrize("field", ["offset", "length"])
def test_a_place_that_is_no_whole_number_or_beyond_the_file_is_refused(
    value: object, field: str, engine: TitanEngine, saved: Path
):
    change(saved, lambda piece: piece.update({field: value}))
    refused(engine, saved, "cannot be read")


@pytest.mark.parametrize("field", ["start", "size"])
@pytest.mark.parametrize("value", [[-1, 0], [2**70], [], "1", None, 7])
def test_a_piece_that_is_not_of_its_tensor_is_refused(value: object, field: str, engine: TitanEngine, saved: Path):
    change(saved, lambda piece: piece.update({field: value}))
    refused(engine, saved, "cannot be read")


@pytest.mark.parametrize("dtype", ["Evil", "load", "", "nn", None, 3])
def test_a_dtype_that_is_none_is_refused(dtype: object, engine: TitanEngine, saved: Path):
    path = saved / "index.json"
    path.write_text(json.dumps({name: spec | {"dtype": dtype} for name, spec in json.loads(path.read_text()).items()}))
    refused(engine, saved, "cannot be read")


@pytest.mark.parametrize(
    "data",
    ["", "[" * 10**5, "[1]", "null", "{}", '{"steps": {}}', '{"steps": 1}', "\x80\x04N."],
    ids=["empty", "nested", "list", "null", "no tensors", "no fields", "number", "pickle"],
)
def test_an_index_that_is_nonsense_is_refused(data: str, engine: TitanEngine, saved: Path):
    (saved / "index.json").write_text(data)
    refused(engine, saved, "cannot be read")
