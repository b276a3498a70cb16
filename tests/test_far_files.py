"""A folder of the controller's machine, used by requests: what comes is what went, and nothing else can be reached."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forge_rl.errors import ModelError
from forge_rl.models.copies import contents_of, copy_of
from forge_rl.runtime import host_logs
from forge_rl.runtime.far_files import FarFolder, FileRequest, FolderServer, filled
from forge_rl.runtime.host_logs import GatheredLogs, new_output, open_log, own_logs
from tests.far_disk import answered


def test_files_come_back_as_they_were_written(tmp_path: Path):
    (tmp_path / "training").mkdir()
    (tmp_path / "model").mkdir()
    data = os.urandom(9_000_001)

    def work(folder: FarFolder) -> None:
        training = folder / "training"
        with training.open("a.tmp", "wb") as file:
            for start in (0, 100, 5_000_000):
                assert file.tell() == start
                file.write(data[start : {0: 100, 100: 5_000_000}.get(start)])
        training.rename("a.tmp", "a")
        assert training.size("a") == len(data)
        with training.open("a", "rb") as file:
            assert file.read(10) == data[:10]
            file.seek(-7, os.SEEK_END)
            assert file.read() == data[-7:]
            file.seek(3)
            assert file.read() == data[3:]
        with filled(folder / "model") as place:
            (place / "config.json").write_text("{}")
            (place / "empty").touch()

    answered(FolderServer(tmp_path), work)
    assert (tmp_path / "training" / "a").read_bytes() == data
    assert {path.name for path in (tmp_path / "training").iterdir()} == {"a"}
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    assert (tmp_path / "model" / "empty").read_bytes() == b""


def test_nothing_outside_of_the_folder_can_be_reached(tmp_path: Path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret").write_text("x")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "up").symlink_to(tmp_path)
    os.mkfifo(inside / "pipe")
    folder = FolderServer(inside)
    for name in ("../secret", "/etc/passwd", "link", "up/secret", "", ".", "a\0b", "pipe", "nothing", "none/of/it"):
        for action in ("size", "read", "write", "rename"):
            request = FileRequest(action=action, name=name, length=10, data=b"y", to="new")  # type: ignore[arg-type]
            if action in ("write", "rename") and name in ("nothing", "pipe", "link"):
                continue
            assert isinstance(folder.answer(request), OSError), (action, name)
    assert isinstance(folder.answer(FileRequest(action="write", name="link", data=b"y")), OSError)
    assert isinstance(folder.answer(FileRequest(action="write", name="pipe", data=b"y")), OSError)
    assert isinstance(folder.answer(FileRequest(action="rename", name="link", to="../taken")), OSError)
    assert (tmp_path / "secret").read_text() == "x"
    assert {path.name for path in tmp_path.iterdir()} == {"inside", "secret"}
    open_to_read = FolderServer(inside, read_only=True)
    assert open_to_read.answer(FileRequest(action="read", name="link", length=10)) == b"x", "as in the hub's cache"
    assert isinstance(open_to_read.answer(FileRequest(action="write", name="new", data=b"y")), OSError)
    assert not (inside / "new").exists()


def test_an_error_of_the_file_system_is_raised_where_the_work_is(tmp_path: Path):
    def work(folder: FarFolder) -> None:
        with folder.open("no/such/folder", "wb") as file:
            file.write(b"x")

    with pytest.raises(FileNotFoundError, match="No such file"):
        answered(FolderServer(tmp_path), work)


def test_a_model_is_copied_once_and_again_if_its_copy_is_damaged(tmp_path: Path):
    source, cache = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"a": 1}))
    (source / "model.safetensors").write_bytes(os.urandom(100_000))
    (source / "notes.bin").write_text("not of the model")
    contents = contents_of(source)
    opened: list[str] = []

    def copy() -> Path:
        def opening(name: str) -> Any:
            opened.append(name)
            return (source / name).open("rb")

        return copy_of(contents, opening, cache)

    local_copy = copy()
    assert {path.name for path in local_copy.iterdir()} == {"config.json", "model.safetensors"}
    assert sorted(opened) == ["config.json", "model.safetensors"]
    assert copy() == local_copy
    assert len(opened) == 2, "it is there"
    (local_copy / "config.json").write_text("{}")
    assert copy() == local_copy
    assert json.loads((local_copy / "config.json").read_text()) == {"a": 1}
    (source / "config.json").write_text("{}")
    (local_copy / "config.json").unlink()
    with pytest.raises(ModelError, match="changed while it was copied"):
        copy()
    names = {path.name for path in (cache / "copies").iterdir()}
    assert names == {local_copy.name, f".{local_copy.name}.lock"}, "nothing half is left"


def test_hosts_that_share_a_disk_copy_a_model_once(tmp_path: Path):
    source, cache = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    (source / "config.json").write_text("{}")
    contents, meeting = contents_of(source), threading.Barrier(2)
    opened: list[str] = []

    def opening(name: str) -> Any:
        opened.append(name)
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(1.0)  # both hosts copy at once, if they can
        return (source / name).open("rb")

    with ThreadPoolExecutor(2) as hosts:
        first, second = hosts.map(lambda _: copy_of(contents, opening, cache), range(2))
    assert first == second
    assert contents_of(first) == contents
    assert opened == ["config.json"]


def test_logs_of_another_host_are_appended_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    far_folder, local_folder = tmp_path / "there", tmp_path / "here"
    far_folder.mkdir()
    local_folder.mkdir()
    monkeypatch.setattr(host_logs.tempfile, "gettempdir", lambda: str(far_folder))
    gathered = GatheredLogs(local_folder)
    gathered.expect("a", "trainer-0.log")
    output = gathered.take("a", {})

    def say(text: str) -> None:
        fd = open_log(own_logs(gathered.name) / "trainer-0.log")
        os.write(fd, text.encode())
        os.close(fd)

    assert new_output(gathered.name, output) == {}
    for text in ("one\n", "two\n", "x" * 3_000_000):
        say(text)
        while new_text := new_output(gathered.name, output):
            output = gathered.take("a", new_text)
    assert (local_folder / "trainer-0.log").read_text() == "one\ntwo\n" + "x" * 3_000_000
    gathered.take("a", {"../evil.log": b"x", "other.log": b"x"})
    gathered.take("b", {"trainer-0.log": b"x"})
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"trainer-0.log"}
    assert (local_folder / "trainer-0.log").stat().st_size == 8 + 3_000_000
