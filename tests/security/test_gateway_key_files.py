"""The owner's key: where it comes from, who else could know it, and how it is told."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from apps import gateway as app
from apps.gateway import KEY_VARIABLE, Config
from forge_rl.errors import ConfigError
from forge_rl.gateway import GatewayConfig
from forge_rl.gateway.keys import kept_key, read_key
from forge_rl.runtime.faults import Faults
from tests.fake_backend import FakeBackend, serving


def written(file: Path, content: str = "secret\n", mode: int = 0o600) -> Path:
    file.write_text(content)
    file.chmod(mode)
    return file


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o601, 0o666])
def test_a_key_file_that_others_may_open_is_refused(tmp_path: Path, mode: int):
    file = written(tmp_path / "key", mode=mode)
    with pytest.raises(ConfigError, match="open to other users"):
        read_key(file)
    with pytest.raises(ConfigError, match="open to other users"):
        kept_key(file)
    assert read_key(written(file)) == "secret"


def test_files_and_links_of_other_users_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = written(tmp_path / "key")
    link = tmp_path / "link"
    link.symlink_to(file)
    assert read_key(link) == "secret"
    owners: dict[str, int] = {}
    lstat, fstat = Path.lstat, os.fstat

    def of(found: os.stat_result, name: str) -> os.stat_result:
        return os.stat_result([*found[:4], owners.get(name, found.st_uid), *found[5:]])

    monkeypatch.setattr(Path, "lstat", lambda path: of(lstat(path), path.name))
    monkeypatch.setattr(os, "fstat", lambda fd: of(fstat(fd), "open"))
    owners["link"] = 12345
    with pytest.raises(ConfigError, match="another user's link"):
        read_key(link)
    owners.update(link=os.getuid(), open=12345)
    with pytest.raises(ConfigError, match="open to other users"):
        read_key(file)


@pytest.mark.parametrize(
    ("content", "told"), [("", "valid key"), ("a b", "valid key"), ("ключ", "not ASCII"), ("x" * 5000, "valid key")]
)
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, content: str, told: str):
    with pytest.raises(ConfigError, match=told) as caught:
        read_key(written(tmp_path / "key", content))
    assert not content or content not in str(caught.value)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for file in (tmp_path / "none", tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="key file"):
            read_key(file)


def test_a_key_is_made_once_for_this_user_alone(tmp_path: Path):
    before = os.umask(0)
    try:
        key = kept_key(tmp_path / "api_key")
    finally:
        os.umask(before)
    assert len(key) >= 40
    assert kept_key(tmp_path / "api_key") == key
    assert kept_key(tmp_path / "other") != key
    assert stat.S_IMODE((tmp_path / "api_key").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "planted")
    with pytest.raises(ConfigError):
        kept_key(tmp_path / "link")
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"without_key": "this-machine", "host": "0.0.0.0"}, "other machines can reach"),
        ({"without_key": "this-machine", "host": "gateway.example"}, "other machines can reach"),
        ({"without_key": "anybody", "api_key_file": Path("key")}, "leave out one"),
    ],
)
def test_a_gateway_without_a_key_must_be_wanted(flags: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        Config(**flags)
    assert not hasattr(Config(), "api_key"), "no flag holds a key, which all users would see"
    assert not hasattr(GatewayConfig(), "api_key")


@pytest.mark.parametrize("source", ["made", "file", "environment", "none"])
async def test_what_the_program_prints_works_as_it_is_and_shows_no_key(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    flags: dict[str, Any] = {"out": tmp_path / "a folder"}
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    if source == "file":
        flags["api_key_file"] = written(tmp_path / "it's mine")
    if source == "environment":
        monkeypatch.setenv(KEY_VARIABLE, "secret")
    if source == "none":
        flags["without_key"] = "this-machine"

    @contextlib.asynccontextmanager
    async def faked(config: Config, key: str) -> AsyncIterator[tuple[Any, Any, Faults]]:
        async with serving(FakeBackend(["5."]), api_key=key, open_to_all=config.without_key != "nobody") as gateway:
            yield gateway, SimpleNamespace(max_model_len=64), Faults()

    monkeypatch.setattr(app, "serving", faked)

    running = asyncio.ensure_future(app.main(Config(**flags)))
    printed = ""
    while "Ctrl-C" not in printed:
        await asyncio.sleep(0.01)
        assert not running.done()
        printed += capsys.readouterr().out
    assert KEY_VARIABLE not in os.environ, "engines inherit no key"
    made = tmp_path / "a folder" / "api_key"
    assert made.exists() == (source == "made")
    assert "secret" not in printed
    assert not made.exists() or made.read_text().strip() not in printed
    command = printed[printed.index("curl") : printed.index("Ctrl-C")]
    environment = {**os.environ, KEY_VARIABLE: "secret", "no_proxy": "*"}
    shell = await asyncio.create_subprocess_exec("bash", "-c", command, env=environment, stdout=subprocess.PIPE)
    answer, _ = await asyncio.wait_for(shell.communicate(), 60)
    assert b'"content":"5."' in answer
    url = next(word for word in printed.split() if word.startswith("http")).rstrip(",")
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{url}/models")).status_code == (200 if source == "none" else 401)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("links", [True, False])
def test_a_key_file_appears_with_its_key_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool):
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if not links:
        monkeypatch.setattr(os, "link", fails)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fails)
        with pytest.raises(ConfigError, match="No space left"):
            kept_key(tmp_path / "api_key")
    assert not [*tmp_path.iterdir()]
    assert kept_key(tmp_path / "api_key") == read_key(tmp_path / "api_key")
    assert [path.name for path in tmp_path.iterdir()] == ["api_key"]
    assert kept_key(tmp_path / "new" / "folder" / "api_key") == read_key(tmp_path / "new" / "folder" / "api_key")
    with pytest.raises(ConfigError, match=r"cannot write the key file .*: Not a directory"):
        kept_key(tmp_path / "api_key" / "api_key")
