"""Images from registries, layouts and archives: what arrives, what is kept, and what a failure leaves."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from forge_rl.errors import ConfigError
from forge_rl.flags.command_line import parse
from forge_rl.sandbox.images import ImageError, ImageStore, LayerPeers
from forge_rl.sandbox.images.references import parse_reference
from forge_rl.sandbox.images.unpack import OPAQUE
from forge_rl.sandbox.images.unpacker import Unpacker
from tests.images import (
    OCI_INDEX,
    OCI_MANIFEST,
    Made,
    digest_of,
    folder,
    image,
    layer,
    link,
    member,
    registry,
    write_docker_archive,
    write_layout,
)

BASE = layer(
    folder("etc"),
    member("etc/name", b"base", mode=0o640, uid=5, mtime=1_000_000_000.25),
    member("etc/old", b"1"),
    folder("data"),
    member("data/hidden", b"2"),
    link("link", "../../etc/passwd"),
    member("hard", type=tarfile.LNKTYPE, linkname="etc/name"),
)
TOP = layer(
    member("etc/.wh.old"), folder("data"), member("data/.wh..wh..opq"), member("data/shown", b"3"), member("üñ", b"4")
)
SETTINGS = {
    "Env": ["PATH=/bin", "EMPTY="],
    "User": "me:1",
    "WorkingDir": "/w",
    "Entrypoint": ["/init"],
    "Cmd": ["sh", "-c", "true"],
}


def big(seed: int = 0, size: int = 3 << 20) -> Made:
    """An image whose one layer cannot be compressed."""
    return image([layer(member("big", os.urandom(size)), member(f"is{seed}"))])


def read(image_folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(image_folder)): path.read_bytes() for path in image_folder.rglob("*") if path.is_file()
    }


async def test_an_image_of_a_registry_has_its_layers_and_settings(tmp_path: Path):
    with registry() as server:
        reference = server.add(image([BASE, TOP, BASE, TOP], SETTINGS), "me/it:1")
        store = ImageStore(tmp_path / "store")
        fetched = await store.get(reference)
        assert await store.get(reference) == fetched
        assert max(server.requests.values()) == 1
        assert sum(server.requests.values()) == 4  # the manifest, the configuration, and two of the four layers
    base, top = fetched.layers
    assert {"etc/name": b"base", "etc/old": b"1", "data/hidden": b"2", "hard": b"base"}.items() <= read(base).items()
    assert (base / "etc/name").stat().st_mtime_ns == 1_000_000_000_250_000_000
    assert (base / "etc/name").stat().st_ino == (base / "hard").stat().st_ino
    assert os.readlink(base / "link") == "../../etc/passwd"
    assert (top / "etc/old").lstat().st_rdev == 0
    assert (top / "etc/old").is_char_device()
    assert os.getxattr(top / "data", OPAQUE) == b"y"
    settings = fetched.settings
    assert (settings.env, settings.user, settings.working_folder) == ({"PATH": "/bin", "EMPTY": ""}, "me:1", "/w")
    assert (settings.entrypoint, settings.command) == (("/init",), ("sh", "-c", "true"))
    (listed,) = store.images()
    assert (listed.references, listed.is_complete) == ([reference], True)


def test_layers_are_an_overlay_for_users_without_privileges(tmp_path: Path):
    write_layout(tmp_path / "layout", image([BASE, TOP]))
    fetched = asyncio.run(ImageStore(tmp_path / "store").get(f"oci:{tmp_path}/layout"))
    lower = ":".join(str(folder) for folder in reversed(fetched.layers))
    script = f"""set -e
        mount -t tmpfs t /mnt; mkdir /mnt/upper /mnt/work /mnt/merged
        mount -t overlay o -o userxattr,lowerdir={lower},upperdir=/mnt/upper,workdir=/mnt/work /mnt/merged
        cd /mnt/merged; find . | sort | tr '\\n' ' '; cat etc/name; echo new > etc/name; echo new > data/hidden"""
    result = subprocess.run(["unshare", "-Urm", "sh", "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == ". ./data ./data/shown ./etc ./etc/name ./hard ./link ./üñ base"
    assert (fetched.layers[0] / "etc/name").read_bytes() == b"base"


def test_users_without_privileges_unpack_and_evict_the_same(tmp_path: Path):
    locked = layer(
        folder("a"), member("a/b", b"1", mode=0), member("a/.wh.c"), folder("a/d"), member("a/d/e"), folder("f", mode=0)
    )
    write_layout(tmp_path / "layout", image([layer(member("x")), locked]))
    script = f"""
import asyncio, os
from pathlib import Path
from forge_rl.sandbox.images import ImageStore
store = ImageStore(Path({str(tmp_path / "store")!r}))
image = asyncio.run(store.get("oci:{tmp_path}/layout"))
files = image.layers[1]
print(os.geteuid(), sorted(os.listdir(files / "a")), (files / "a/c").is_char_device(), store.disk_bytes() > 0)
try:
    os.mkdir(files / "f/g")
except PermissionError:
    print("no privileges")
os.chmod(files / "a", 0)
asyncio.run(store.prune())
print(os.listdir({str(tmp_path / "store/layers")!r}), os.listdir({str(tmp_path / "store/partial")!r}))
"""
    command = ["unshare", "-U", "--map-user=1000", sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "1000 ['b', 'c', 'd'] True True\nno privileges\n[] []\n", result.stderr


@pytest.mark.parametrize("compression", ["zstd", "none"])
async def test_layers_may_be_compressed_otherwise(compression: str, tmp_path: Path):
    def zstd(data: bytes) -> bytes:
        return pyarrow.compress(data, "zstd", asbytes=True) if compression == "zstd" else data

    write_layout(tmp_path / "layout", image([BASE], compress=zstd))
    fetched = await ImageStore(tmp_path / "store").get(f"oci:{tmp_path}/layout")
    assert read(fetched.layers[0])["etc/name"] == b"base"


async def test_archives_are_images_too(tmp_path: Path):
    write_docker_archive(tmp_path / "saved.tar", [BASE, TOP, BASE, TOP])
    (tmp_path / "saved.tar.gz").write_bytes(gzip.compress((tmp_path / "saved.tar").read_bytes()))
    write_layout(tmp_path / "layout", image([BASE, TOP]), tags=("one", "two"))
    with tarfile.open(tmp_path / "oci.tar", "w") as archive:
        archive.add(tmp_path / "layout", ".")
    store = ImageStore(tmp_path / "store")
    names = ("docker-archive:saved.tar", "docker-archive:saved.tar.gz", "docker-archive:saved.tar:it:latest")
    names += ("oci-archive:oci.tar:one", "oci:layout:two", "oci:layout")
    images = [await store.get(name.replace(":", f":{tmp_path}/", 1)) for name in names]
    assert {fetched.layers for fetched in images} == {images[0].layers}
    assert images[0].settings.command == ("sh",)
    with pytest.raises(ImageError, match="no image 'three': one, two"):
        await store.get(f"oci:{tmp_path}/layout:three")
    with pytest.raises(ImageError, match=r"none.tar does not exist"):
        await store.get(f"docker-archive:{tmp_path}/none.tar")
    (tmp_path / "text").write_text("words " * 200)
    with pytest.raises(ImageError, match="text is not an archive of an image"):
        await store.get(f"docker-archive:{tmp_path}/text")


async def test_an_archive_that_has_changed_is_read_again(tmp_path: Path):
    store, name = ImageStore(tmp_path / "store"), f"docker-archive:{tmp_path}/saved.tar"
    write_docker_archive(tmp_path / "saved.tar", [BASE])
    first = await store.get(name)
    write_docker_archive(tmp_path / "saved.tar", [BASE, TOP])
    assert (await store.get(name)).layers[:1] == first.layers
    assert len((await store.get(name)).layers) == 2


async def test_an_index_is_read_for_this_processor(tmp_path: Path):
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    with registry() as server:
        right, wrong = image([BASE]), image([TOP])
        platforms = [(wrong, "unknown"), (wrong, "s390x"), (right, machine)]
        manifests = [
            {"digest": made.manifest, "size": 1, "platform": {"os": "linux", "architecture": architecture}}
            for made, architecture in platforms
        ]
        index = json.dumps({"mediaType": OCI_INDEX, "manifests": manifests}).encode()
        server.add(right, "it:right")
        server.blobs[digest_of(index)] = index
        store = ImageStore(tmp_path / "store")
        fetched = await store.get(f"{server.host}/it@{digest_of(index)}")
        assert fetched.digest == right.manifest
        only_others = json.dumps({"mediaType": OCI_INDEX, "manifests": manifests[:2]}).encode()
        server.blobs[digest_of(only_others)] = only_others
        with pytest.raises(ImageError, match=rf"nothing for linux/{machine}: linux/unknown, linux/s390x"):
            await store.get(f"{server.host}/it@{digest_of(only_others)}")
        other = json.dumps({"schemaVersion": 1, "mediaType": OCI_MANIFEST + "x"}).encode()
        server.blobs[digest_of(other)] = other
        with pytest.raises(ImageError, match="not an image"):
            await store.get(f"{server.host}/it@{digest_of(other)}")
    assert (await ImageStore(tmp_path / "store").get(f"{server.host}/it@{digest_of(index)}")).digest == right.manifest


async def test_credentials_are_used_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(0)
    with registry(password="hunter2-secret") as server:
        reference = server.add(image([BASE]), "me/it:1")

        def auth(password: str) -> Path:
            token = base64.b64encode(f"me:{password}".encode()).decode()
            path = tmp_path / f"{len(password)}.json"
            path.write_text(json.dumps({"auths": {f"{server.host}/me": {"auth": token}, "x.example": {"auth": "!"}}}))
            return path

        for files, reason in (((), "gives no token"), ((auth("wrong-secret"),), "gives no token")):
            with pytest.raises(ImageError, match=reason) as error:
                await ImageStore(tmp_path / "store", credentials=files).get(reference)
            assert "secret" not in f"{error.value!s}{error.value!r}"
        store = ImageStore(tmp_path / "store", credentials=(tmp_path / "none.json", auth("hunter2-secret")))
        await store.get(reference)
        assert "secret" not in caplog.text + repr(vars(store)) + repr(vars(store)["_access"])
        assert server.requests["/token"] == 3
        with pytest.raises(ImageError, match="user in it") as error:
            await store.get(f"me:hunter2-secret@{server.host}/me/it:1")
        assert "secret" not in str(error.value)


async def test_a_credential_helper_gets_the_variables_of_its_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    helper = tmp_path / "docker-credential-cloud"
    helper.write_text("""#!/bin/sh\nprintf '{"Username": "me", "Secret": "%s"}' "$AWS_SECRET_ACCESS_KEY"\n""")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-secret")
    with registry(password="hunter2-secret") as server:
        reference = server.add(image([BASE]), "me/it:1")
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"credHelpers": {server.host: "cloud"}}))
        assert (await ImageStore(tmp_path / "store", credentials=(config,)).get(reference)).layers


async def test_a_registry_of_this_machine_is_asked_without_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    with registry() as server:
        assert (await ImageStore(tmp_path / "store").get(server.add(image([BASE]), "it:1"))).layers


async def test_a_download_goes_on_where_it_broke_off(tmp_path: Path):
    made = big()
    (blob,) = made.layers
    size = len(made.blobs[blob])
    with registry(breaks={blob: 2 << 20}) as server:
        parts: list[int] = []
        store = ImageStore(tmp_path / "store", progress=lambda progress: parts.append(progress.done_bytes))
        fetched = await store.get(server.add(made, "it:1"))
        assert server.requests[f"/v2/it/blobs/{blob}"] == 2
        assert server.bytes_sent < size + 1000 + len(made.blobs[made.config])
        assert len(read(fetched.layers[0])["big"]) == 3 << 20
        assert sorted(parts) == parts
        assert parts[-1] == size


async def test_a_registry_without_ranges_sends_everything_again(tmp_path: Path):
    made = big()
    with registry(breaks={made.layers[0]: 2 << 20}, ranges=False) as server:
        fetched = await ImageStore(tmp_path / "store").get(server.add(made, "it:1"))
        assert len(read(fetched.layers[0])["big"]) == 3 << 20


async def test_a_damaged_download_is_fetched_again_and_a_false_one_refused(tmp_path: Path):
    made = image([BASE])
    (blob,) = made.layers
    with registry(lies={blob: bytes(len(made.blobs[blob]))}) as server:
        store = ImageStore(tmp_path / "store")
        await store.get(server.add(made, "it:1"))
        assert server.requests[f"/v2/it/blobs/{blob}"] == 2
        other = image([TOP])
        server.add(other, "it:2")
        server.blobs[other.layers[0]] = bytes(len(other.blobs[other.layers[0]]))
        with pytest.raises(ImageError, match="has another digest"):
            await store.get(f"{server.host}/it:2")


async def test_passing_failures_are_tried_again_and_others_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forge_rl.sandbox.images.registry._FIRST_WAIT_S", 0.0)
    with registry(refusals=[503, 429]) as server:
        reference = server.add(image([BASE]), "it:1")
        store = ImageStore(tmp_path / "store")
        await store.get(reference)
        with pytest.raises(ImageError, match=r"it \(manifests/2\) does not exist"):
            await store.get(f"{server.host}/it:2")
        server.refusals[:] = [403]
        with pytest.raises(ImageError, match="may not be read"):
            await store.get(f"{server.host}/it:3")
        server.refusals[:] = [500] * 5
        with pytest.raises(ImageError, match="answered 500"):
            await store.get(f"{server.host}/it:4")
    digest = image([BASE]).manifest
    await store.get(f"{server.host}/it@{digest}")  # which is here, and needs no registry
    with pytest.raises(ImageError, match="cannot be reached: ConnectError"):
        await ImageStore(tmp_path / "store").get(reference)


async def test_mirrors_are_asked_first(tmp_path: Path):
    with registry() as mirror, registry() as server:
        one, two = image([BASE]), image([TOP])
        mirror.add(one, "it:1")
        server.add(one, "it:1")
        server.add(two, "it:2")
        mirror.tags["it:2"] = two.manifest
        mirror.blobs[two.manifest] = two.blobs[two.manifest]
        mirror.blobs[two.config] = two.blobs[two.config]
        store = ImageStore(tmp_path / "store", mirrors={server.host: [mirror.address]})
        await store.get(f"{server.host}/it:1")
        assert not server.requests
        await store.get(f"{server.host}/it:2")
        assert list(server.requests) == [f"/v2/it/blobs/{two.layers[0]}"]


async def test_mirrors_are_those_of_registries_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with registry() as mirror, registry() as server:
        mirror.add(image([BASE]), "it:1")
        path = tmp_path / "registries.conf"
        monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(path))
        lines = ["unqualified-search-registries = []", "[[registry]]", f'location = "{server.host}"']
        lines += ["[[registry.mirror]]", f'location = "{mirror.host}"', "insecure = true"]
        lines += ["[[registry.mirror]]", 'location = "a.example/path"']
        lines += ["[[registry]]", 'location = "b.example/c"', "blocked = true"]
        path.write_text("\n".join(lines))
        with pytest.warns(UserWarning, match="is not used") as mirror_warnings:
            store = ImageStore(tmp_path / "store")
        assert [str(warning.message).partition(": ")[2] for warning in mirror_warnings] == [
            "the mirror 'a.example/path' is not used",
            "what it says of 'b.example/c' is not used",
        ]
        await store.get(f"{server.host}/it:1")
        assert mirror.requests
        assert not server.requests
        path.write_text("[[registry")
        with pytest.raises(ConfigError, match="cannot be read as registries"):
            ImageStore(tmp_path / "store")
        path.unlink()
        with pytest.raises(ConfigError, match="which is not a file"):
            ImageStore(tmp_path / "store")


@pytest.mark.parametrize(
    ("text", "registry", "repository", "wanted"),
    [
        ("debian", "docker.io", "library/debian", "latest"),
        ("a/b:1.0", "docker.io", "a/b", "1.0"),
        ("localhost/a", "localhost", "a", "latest"),
        ("host.example:5000/a/b/c:x", "host.example:5000", "a/b/c", "x"),
        (f"ghcr.io/a/b:1@sha256:{'a' * 64}", "ghcr.io", "a/b", f"sha256:{'a' * 64}"),
    ],
)
def test_names_are_read_as_docker_does(text: str, registry: str, repository: str, wanted: str):
    parsed = parse_reference(text)
    assert (parsed.registry, parsed.repository, parsed.tag_or_digest) == (registry, repository, wanted)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Upper/case",
        "a b",
        "a/../b",
        "host.example/",
        "a:b:c",
        "a@sha256:12",
        "https://host/a",
        "-a",
        "oci:",
        "a:$x",
    ],
)
def test_other_names_are_refused(text: str):
    with pytest.raises(ImageError):
        parse_reference(text)


async def test_a_killed_unpacking_begins_again_and_one_that_always_is_killed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    large_image, kills_left = big(), 3
    unpack = Unpacker.unpack

    def killed(self: Unpacker, *arguments: Any) -> Any:
        nonlocal kills_left
        if kills_left:
            kills_left -= 1
            self._process.kill()
        return unpack(self, *arguments)

    monkeypatch.setattr(Unpacker, "unpack", killed)
    with registry() as server:
        reference = server.add(large_image, "it:1")
        store = ImageStore(tmp_path / "store")
        assert all(folder.is_dir() for folder in (await store.get(reference)).layers)
        await store.prune()
        kills_left = 99
        with pytest.raises(ImageError, match="is killed again and again"):
            await store.get(reference)
    await store.prune()
    assert [*store._layers.layers.iterdir(), *store._layers.partial.iterdir()] == []
    assert unpackers() == []


def unpackers() -> list[bytes]:
    text = "".join(path.read_text() for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"))
    commands = [path.read_bytes() for pid in text.split() if (path := Path(f"/proc/{pid}/cmdline")).exists()]
    return [command for command in commands if b"images.unpack" in command]


async def test_processes_started_ahead_end_if_no_layer_needs_them(tmp_path: Path):
    made = big()
    with registry() as server:
        reference = server.add(made, "it:1")
        await ImageStore(tmp_path / "store").get(reference)
        await ImageStore(tmp_path / "store").get(reference)  # another store looks the tag up, and needs no layer
        with pytest.raises(ImageError):
            await ImageStore(tmp_path / "store").get(f"{server.host}/none:1")
    assert unpackers() == []


async def test_many_who_want_a_layer_wait_for_one_download(tmp_path: Path):
    made = big()
    with registry() as server:
        reference, store = server.add(made, "it:1"), ImageStore(tmp_path / "store")
        server.held.add(made.layers[0])
        tasks = [asyncio.create_task(store.get(reference)) for _ in range(8)]
        async with asyncio.timeout(60):
            while not (works := list(store._work.values())) or works[0].waiters < 8:  # noqa: ASYNC110  what threads do
                await asyncio.sleep(0.001)
        tasks[0].cancel()
        server.go_on.set()
        assert len({fetched.layers for fetched in await asyncio.gather(*tasks[1:])}) == 1
        assert (server.requests["/v2/it/manifests/1"], server.requests[f"/v2/it/blobs/{made.layers[0]}"]) == (1, 1)
        await store.prefetch([reference, reference])
        with pytest.raises(ImageError):
            await store.prefetch([f"{server.host}/none:1", reference])


CHILD = """
import asyncio, sys
from pathlib import Path
from forge_rl.sandbox.images import ImageStore
async def main():
    store = ImageStore(Path(sys.argv[1]))
    for reference in sys.argv[2:]:
        async with store.use(reference) as image:
            print(image.digest, flush=True)
    async with store.use(reference):
        sys.stdin.read()
asyncio.run(main())
"""


def child(store: Path, *references: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(store), *references]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def until(is_reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    async with asyncio.timeout(60):
        while not is_reached() and process.poll() is None:  # noqa: ASYNC110  another process's files
            await asyncio.sleep(0.001)


async def test_processes_unpack_a_layer_once(tmp_path: Path):
    made = big()
    with registry() as server:
        reference = server.add(made, "it:1")
        processes = [child(tmp_path / "store", reference) for _ in range(3)]
        outputs = [await asyncio.to_thread(process.communicate, "") for process in processes]
        assert {output for output, _ in outputs} == {f"{made.manifest}\n"}
        assert server.requests[f"/v2/it/blobs/{made.layers[0]}"] == 1


async def test_a_killed_download_goes_on_in_the_next_process(tmp_path: Path):
    made = big()
    (blob,) = made.layers
    with registry() as server:
        reference = server.add(made, "it:1")
        server.breaks[blob] = 2 << 20
        server.refusals[:] = []
        process = child(tmp_path / "store", reference)
        part = tmp_path / "store/partial" / f"{made.diff_ids[0].removeprefix('sha256:')}.part"
        await until(lambda: part.exists() and part.stat().st_size >= 1 << 20, process)
        process.kill()
        process.communicate()
        sent = server.bytes_sent
        fetched = await ImageStore(tmp_path / "store").get(reference)
        assert len(read(fetched.layers[0])["big"]) == 3 << 20
        assert server.bytes_sent - sent <= len(made.blobs[blob])
        assert list((tmp_path / "store/partial").iterdir()) == []


async def test_what_a_killed_process_left_half_unpacked_is_removed(tmp_path: Path):
    made = image([layer(*(member(f"{index}", b"x" * 9000) for index in range(1000)))])
    write_layout(tmp_path / "layout", made)
    name = made.diff_ids[0].removeprefix("sha256:")
    process = child(tmp_path / "store", f"oci:{tmp_path}/layout")
    await until((tmp_path / f"store/partial/{name}/files/100").exists, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (tmp_path / "store/partial/abc/files").mkdir(parents=True)  # of one that is never asked for again
    (tmp_path / "store/partial/abc.evicted-1").mkdir()
    fetched = await ImageStore(tmp_path / "store").get(f"oci:{tmp_path}/layout")
    assert len(read(fetched.layers[0])) == 1000
    assert list((tmp_path / "store/partial").iterdir()) == []


async def test_the_longest_unused_is_evicted_but_nothing_that_is_held(tmp_path: Path):
    images = [big(index, 1 << 20) for index in range(4)]
    for index, made in enumerate(images):
        write_layout(tmp_path / str(index), made)
    names = [f"oci:{tmp_path}/{index}" for index in range(4)]
    store = ImageStore(tmp_path / "store", max_bytes=(7 << 20) // 2)
    first, second = [await store.get(name) for name in names[:2]]
    other = child(tmp_path / "store", names[1])
    assert other.stdout is not None
    other.stdout.readline()
    with store.hold(first):
        os.utime(first.layers[0].parent, (0, 0))
        third = await store.get(names[2])
        fourth = await store.get(names[3])
        assert [fetched.layers[0].exists() for fetched in (first, second, third, fourth)] == [True, True, False, True]
        with store.hold(fourth), pytest.raises(ImageError, match="the layers in use have"):
            await store.get(names[2])
    with pytest.raises(ImageError, match="has been evicted"), store.hold(third):
        pass
    other.kill()  # its hold ends with it
    other.communicate()
    assert store.disk_bytes() <= 7 << 19
    assert await store.prune() == 3 * ((1 << 20) + 4096)  # with what is kept beside the files
    assert (store.images(), store.disk_bytes()) == ([], 0)
    assert len((await store.get(names[2])).layers) == 1


def test_a_full_disk_is_a_named_error(tmp_path: Path):
    write_layout(tmp_path / "layout", big(size=5 << 20))
    script = f"""
import asyncio
from pathlib import Path
from forge_rl.sandbox.images import ImageError, ImageStore
try:
    asyncio.run(ImageStore(Path("/mnt/store")).get("oci:{tmp_path}/layout"))
except ImageError as error:
    print(error)
print(sorted(path.name for path in Path("/mnt/store").rglob("*") if path.suffix != ".part"))
"""
    (tmp_path / "script.py").write_text(script)
    command = f"mount -t tmpfs -o size=4m t /mnt && exec {sys.executable} {tmp_path}/script.py"
    result = subprocess.run(["unshare", "-Urm", "sh", "-c", command], capture_output=True, text=True)
    assert "could not be unpacked: No space left on device\n  hint: free space" in result.stdout, result.stderr
    assert "['images', 'layers', 'partial']" in result.stdout


async def test_a_dockerfile_is_built_where_a_builder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_layout(tmp_path / "layout", image([BASE]))
    with tarfile.open(tmp_path / "built.tar", "w") as archive:
        archive.add(tmp_path / "layout", ".")
    (tmp_path / "context").mkdir()
    (tmp_path / "context/Dockerfile").write_text("FROM scratch\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    store, name = ImageStore(tmp_path / "store"), f"dockerfile:{tmp_path}/context"
    with pytest.raises(ImageError, match="needs buildah or podman"):
        await store.get(name)
    (tmp_path / "bin").mkdir()
    for program in ("sh", "cp"):
        (tmp_path / "bin" / program).symlink_to(shutil.which(program, path="/bin:/usr/bin") or "")
    builder = tmp_path / "bin/buildah"
    builder.write_text(
        f'#!/bin/sh\necho "$1" >> {tmp_path}/calls\n'
        f'if [ "$1" = push ]; then cp {tmp_path}/built.tar "${{3#oci-archive:}}"; fi\n'
    )
    builder.chmod(0o755)
    assert read((await store.get(name)).layers[0])["etc/name"] == b"base"
    await store.get(name)
    assert (tmp_path / "calls").read_text().split() == ["build", "push", "rmi"]
    builder.write_text('#!/bin/sh\necho "no such base" >&2; exit 1\n')
    with pytest.raises(ImageError, match=r"buildah build failed for .*: no such base"):
        await ImageStore(tmp_path / "store").get(name)


async def test_a_host_fetches_layers_from_a_peer_and_trusts_none(tmp_path: Path):
    key = "a key of the job"
    long_name = "/".join(["a" * 90] * 3)
    twice = layer(member("f", b"1"), member("f", b"2"))
    made = image([BASE, TOP, layer(member(long_name, os.urandom(3 << 20), uid=2**31)), twice])
    with registry() as server:
        reference = server.add(made, "it:1")
        first = ImageStore(tmp_path / "first")
        here = await first.get(reference)
        with first.serve("127.0.0.1", 0, key) as port:
            before = server.requests.copy()
            for peer_key, layers_fetched in (("another key of some", 4), (key, 1)):  # one has a file twice
                server.requests.clear()
                peers = LayerPeers(addresses=["http://127.0.0.1:9", f"http://127.0.0.1:{port}"], key=peer_key)
                store = ImageStore(tmp_path / f"store{layers_fetched}", peers=peers)
                there = await store.get(reference)
                assert [read(folder) for folder in there.layers] == [read(folder) for folder in here.layers]
                assert sum("/blobs/" in path for path in server.requests) == layers_fetched + 1
            (here.layers[0] / "etc/name").write_bytes(b"evil")
            await ImageStore(tmp_path / "third", peers=peers).get(reference)
            assert server.requests[f"/v2/it/blobs/{made.layers[0]}"] == 1
            assert before.keys() >= server.requests.keys()
    assert key not in repr(peers)
    with pytest.raises(ConfigError, match="a key of 5 letters"), first.serve("127.0.0.1", 0, "short"):
        pass


async def test_the_command_pulls_lists_and_prunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from apps.images import Config, main

    write_layout(tmp_path / "layout", image([BASE, TOP]))
    name, store = f"oci:{tmp_path}/layout", tmp_path / "store"
    await main(Config(action="pull", images=(name,), store=store))
    assert "2 layers" in capsys.readouterr().out
    await main(Config(action="list", store=store))
    assert "complete" in capsys.readouterr().out
    await main(Config(action="prune", store=store))
    assert "0.00 GB are left" in capsys.readouterr().out
    for arguments in ({"action": "pull"}, {"action": "list", "images": ("a",)}, {"action": "serve"}):
        with pytest.raises(ConfigError):
            Config(**arguments)
    (tmp_path / "key").write_text("k" * 20)
    (tmp_path / "key").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = Config(action="serve", key_file=tmp_path / "key", port=listener.getsockname()[1], store=store)
        with pytest.raises(ConfigError, match="Address already in use"):
            await main(config)
    with pytest.raises(ConfigError, match=r"layout/index.json cannot be written: Not a directory"):
        await main(Config(action="list", store=tmp_path / "layout" / "index.json"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("list --max-gb 5", "--max-gb has no effect: list does not read it"),
        ("prune --mirror a=b", "--mirror has no effect: prune"),
        ("pull debian --port 9", "--port has no effect: pull"),
        ("pull debian --key-file key", "--key-file has no effect: no --peer is asked"),
        ("serve --key-file key --peer http://a", "--peer has no effect: serve"),
        ("serve --key-file key --address 127.0.0.2 --port 9", ""),
        ("pull debian --key-file key --peer http://a --max-gb 5 --mirror a=b", ""),
        ("prune --max-gb 5", ""),
    ],
)
def test_flags_that_an_action_does_not_read_are_refused_by_name(flags: str, message: str):
    from apps.images import Config

    config = parse(Config, "images", flags.split())
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        config.check_effects()


@pytest.mark.long
async def test_killed_pulls_and_evictions_leave_nothing_half(tmp_path: Path):
    draw, folder = random.Random(1), tmp_path / "store"
    with registry() as server:
        references = []
        for index in range(4):
            small = layer(*(member(f"{index}/{number}", os.urandom(3000)) for number in range(200)))
            references.append(server.add(image([small, layer(member("x", os.urandom(1 << 20)))]), f"it{index}:1"))
        kills = 0
        while kills < 20:
            processes = [child(folder, *draw.sample(references, 3)) for _ in range(2)]
            await asyncio.sleep(draw.uniform(0.3, 2.0))
            for process in processes:
                kills += process.poll() is None
                process.kill()
                process.communicate()
            if draw.random() < 0.3:
                await ImageStore(folder).prune(2 << 20)
        store = ImageStore(folder)
        for reference in references:
            first, second = (await store.get(reference)).layers
            assert (len(read(first)), len(read(second)["x"])) == (200, 1 << 20)
        async with asyncio.timeout(60):  # an unpacker lets go of its layer a moment after its process was killed
            while sorted(path.name for path in folder.rglob("*")) != ["images", "layers", "partial"]:
                await store.prune()
                await asyncio.sleep(0.05)
