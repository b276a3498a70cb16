"""Folders in file systems: files that are seen whole or not at all, and none of the machine's own in between."""

import tempfile
from pathlib import Path

import pytest

from forge_rl.errors import ConfigError
from forge_rl.system.remote_folders import RemoteFolder
from tests.s3 import S3


def opened(address: str) -> RemoteFolder:
    return RemoteFolder(address, flag="--flag", error=ConfigError)


def test_a_file_is_written_read_replaced_and_removed(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))  # from there a file would be copied
    folder = opened(address)
    assert (folder.names(), folder.exists("a/b")) == ([], False)
    for data in (b"12345", b"", b"123"):
        folder.write("a/b", data)
        assert (folder.names(), folder.size("a/b")) == (["a"], len(data))
        assert [folder.read("a/b", max_bytes) for max_bytes in (2, 9)] == [data[:3], data]
    folder.write("c", b"")
    assert sorted(folder.names()) == ["a", "c"]
    folder.remove("c")
    for _ in range(2):
        folder.remove_folder("a")
        folder.remove("c")
    assert not folder.exists("a/b")
    with pytest.raises(FileNotFoundError):
        folder.read("a/b", 9)


def test_a_broken_large_upload_resumes_or_leaves_nothing(s3: S3, tmp_path: Path) -> None:
    folder, large = opened("s3://bucket/run"), tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(101 << 20)  # s3fs writes 100 MiB and more in parts
    s3.fails("PUT", "partNumber=2", "reset", times=100)
    with pytest.raises(OSError, match="endpoint"):
        folder.put(large, "large")
    assert not folder.exists("large")
    assert s3.uploads() == 0, "no part is left that costs money"
    s3.fails_no_more()
    s3.fails("PUT", "partNumber=2", "reset")
    folder.put(large, "large")
    s3.fails("GET", "large", "reset")
    folder.get("large", tmp_path / "copy")
    assert s3.struck[-1] == "reset"
    assert (tmp_path / "copy").stat().st_size == 101 << 20
