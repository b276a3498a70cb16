"""Registries, mirrors and archives that harm: none costs more than its own image, or learns what is not its own."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from forge_rl.sandbox.images import ImageError, ImageStore, LayerPeers, archives
from forge_rl.sandbox.images.archives import LocalSource
from forge_rl.sandbox.images.layer_stream import layer_chunks
from forge_rl.sandbox.images.references import LocalReference
from forge_rl.sandbox.images.sources import LayerBlob, LayerJob
from tests.images import image, layer, member, registry, write_docker_archive, write_layout

Answers = dict[str, tuple[int, dict[str, str], httpx.SyncByteStream]]


def answering(store: ImageStore, answers: Answers) -> list[httpx.Request]:
    """Let URLs have these answers; return the requests to come."""
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        status, headers, stream = answers[str(request.url)]
        return httpx.Response(status, headers=headers, stream=stream)

    vars(store._access)["client"] = httpx.Client(transport=httpx.MockTransport(answer))
    return requests


class Endless(httpx.SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield bytes(1 << 16)


async def test_redirects_keep_passwords_and_tls(tmp_path: Path):
    built_image, auths = image([layer(member("a"))]), tmp_path / "auths.json"
    (blob,) = built_image.layers
    auths.write_text(json.dumps({"auths": {"r.example": {"auth": "bWU6c2VjcmV0"}}}))
    url = f"https://r.example/v2/it/blobs/{blob}"
    blob_answers: Answers = {digest: (200, {}, httpx.ByteStream(data)) for digest, data in built_image.blobs.items()}
    manifest = "https://r.example/v2/it/manifests/1"
    answers: Answers = {f"https://r.example/v2/it/blobs/{digest}": answer for digest, answer in blob_answers.items()}
    store = ImageStore(tmp_path / "store", credentials=(auths,))
    requests = answering(store, answers)
    answers[manifest] = (401, {"www-authenticate": "Basic realm=x"}, httpx.ByteStream(b""))
    with pytest.raises(ImageError, match=r"\(401\)"):
        await store.get("r.example/it:1")
    assert requests[-1].headers["authorization"] == "Basic bWU6c2VjcmV0"
    answers[manifest] = blob_answers[built_image.manifest]
    # What comes with a redirect is not read: it may have no end.
    answers[url] = (307, {"location": "https://other.example/blob"}, Endless())
    answers["https://other.example/blob"] = blob_answers[blob]
    await store.get("r.example/it:1")
    authorized = {request.url.host: "authorization" in request.headers for request in requests}
    assert authorized == {"r.example": True, "other.example": False}
    for location, reason in (("http://127.0.0.1:9/stop", "to an address without TLS"), (url, "in circles")):
        answers[url] = (302, {"location": location}, Endless())
        await store.prune()
        with pytest.raises(ImageError, match=f"redirects {reason}"):
            await store.get("r.example/it:1")
    assert {request.url.host for request in requests} == {"r.example", "other.example"}


async def test_a_mirror_that_lies_of_a_manifest_is_left_for_the_registry(tmp_path: Path):
    built_image = image([layer(member("a"))])
    with registry() as mirror, registry() as server:
        mirror.add(built_image, "it:1")
        server.add(built_image, "it:1")
        for digest in (built_image.manifest, built_image.config):
            mirror.blobs[digest] = b'{"mediaType": "x"}'
        store = ImageStore(tmp_path / "store", mirrors={"*": [mirror.address]})
        assert (await store.get(f"{server.host}/it@{built_image.manifest}")).digest == built_image.manifest
        assert len(server.requests) == 2


async def test_an_image_that_lies_of_a_layer_does_not_harm_others_with_it(tmp_path: Path):
    built_image = image([layer(member("a", os.urandom(9000)))])
    (blob,) = built_image.layers
    with registry() as hostile, registry() as server:
        hostile.add(built_image, "bad:1")
        server.add(built_image, "it:1")
        hostile.blobs[blob] = bytes(len(built_image.blobs[blob]))
        hostile.held.add(blob)
        store = ImageStore(tmp_path / "store")
        hostile_fetch = asyncio.create_task(store.get(f"{hostile.host}/bad:1"))
        async with asyncio.timeout(60):
            while not store._work:  # noqa: ASYNC110  what threads do
                await asyncio.sleep(0.001)
            sound_fetch = asyncio.create_task(store.get(f"{server.host}/it:1"))
            while next(iter(store._work.values())).waiters < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        hostile.go_on.set()
        assert (await sound_fetch).digest == built_image.manifest
        with pytest.raises(ImageError, match="has another digest"):
            await hostile_fetch


async def test_a_layer_larger_than_the_store_is_not_fetched(tmp_path: Path):
    built_image = image([layer(member("a", os.urandom(3 << 20)))])
    with registry() as server:
        reference = server.add(built_image, "it:1")
        with pytest.raises(ImageError, match=rf"{built_image.layers[0]} has \d+ bytes"):
            await ImageStore(tmp_path / "store", max_bytes=1 << 20).get(reference)
        assert not any(built_image.layers[0] in path for path in server.requests)


async def test_what_pulls_and_builds_left_is_evicted_too(tmp_path: Path):
    write_layout(tmp_path / "layout", image([layer(member("a"))]))
    store = ImageStore(tmp_path / "store", max_bytes=1 << 20)
    partial = tmp_path / "store/partial"
    (partial / f"{'a' * 64}.part").write_bytes(os.urandom(2 << 20))  # of a pull that nobody takes up again
    for name, age_s in (("new.build", 0), ("old.build", 8 * 86_400)):
        (partial / name).mkdir()
        os.utime(partial / name, (os.stat(tmp_path).st_mtime - age_s,) * 2)
    await store.get(f"oci:{tmp_path}/layout")
    assert [path.name for path in partial.iterdir()] == ["new.build"]


async def test_what_is_kept_beside_files_counts(tmp_path: Path):
    write_layout(tmp_path / "layout", image([layer(member("a")) + os.urandom(2 << 20)]))
    store = ImageStore(tmp_path / "store")
    await store.get(f"oci:{tmp_path}/layout")
    assert store.disk_bytes() > 2 << 20


async def test_a_registry_that_only_drips_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forge_rl.sandbox.images.registry._FIRST_WAIT_S", 0.0)
    monkeypatch.setattr("forge_rl.sandbox.images.registry._SLOW_S", -1.0)
    monkeypatch.setattr("forge_rl.sandbox.images.registry._MIN_BYTES_S", 1e30)
    with registry() as server:
        reference = server.add(image([layer(member("a"))]), "it:1")
        with pytest.raises(ImageError, match=r"sent \d+ bytes of a layer in"):
            await ImageStore(tmp_path / "store").get(reference)


async def test_archives_that_harm_are_refused_by_name(tmp_path: Path):
    store = ImageStore(tmp_path / "store")
    with tarfile.open(tmp_path / "names.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("a" * 9000))
    os.mkfifo(tmp_path / "pipe")
    write_docker_archive(tmp_path / "tags.tar", [layer(member("a"))])
    data = (tmp_path / "tags.tar").read_bytes()
    (tmp_path / "tags.tar").write_bytes(data.replace(b'["it:latest"]', b"123          "))
    for name, reason in (
        ("names.tar", "has a name of 9000"),
        ("pipe", "neither a file nor"),
        ("tags.tar:x", "no image"),
    ):
        async with asyncio.timeout(60):
            with pytest.raises(ImageError, match=reason):
                await store.get(f"docker-archive:{tmp_path}/{name}")
    labels: object = "x"
    for _ in range(300):
        labels = [labels]
    write_layout(tmp_path / "deep", image([layer(member("a"))], {"Labels": labels}))
    with pytest.raises(ImageError, match="nested more than"):
        await store.get(f"oci:{tmp_path}/deep")


def test_an_archive_that_is_refused_leaves_no_file_and_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "cut").write_bytes(gzip.compress(os.urandom(1 << 20))[:-9])
    (tmp_path / "bomb").write_bytes(gzip.compress(bytes(64 << 20)))
    (tmp_path / "text").write_bytes(b"no archive" * 999)
    monkeypatch.setattr(archives, "_FREE_BYTES", 1 << 20)
    monkeypatch.setattr(archives, "_MAX_RATIO", 1)
    fds, threads = os.listdir("/proc/self/fd"), threading.enumerate()
    for name in ("pipe", "cut", "bomb", "text"):
        with pytest.raises(ImageError):
            LocalSource(LocalReference(kind="docker-archive", path=tmp_path / name, tag=""), tmp_path).content()
    assert os.listdir("/proc/self/fd") == fds
    # The thread has handed over its last word, and ends.
    for thread in {*threading.enumerate()} - {*threads}:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("zeros", [0, 7, 300_000])
def test_members_of_a_gzip_stream_may_be_padded_with_zeros(zeros: int, tmp_path: Path):
    parts = [os.urandom(100_000), b"", os.urandom(9)]
    data = b"".join(gzip.compress(part) + bytes(zeros) for part in parts)
    (tmp_path / "layer").write_bytes(data)
    with (tmp_path / "layer").open("rb") as file:
        assert b"".join(layer_chunks(file.fileno(), 0, len(data))) == gzip.decompress(data) == b"".join(parts)


async def test_what_a_peer_has_half_sent_is_not_taken_for_the_registrys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def half(peers: LayerPeers, blob: LayerBlob, job: LayerJob, max_bytes: int) -> None:
        os.pwrite(job.partial_fd, b"half", 0)
        raise ImageError("nobody waits for it any more")

    one_layer_image = image([layer(member("a", b"1"))])
    with registry() as server:
        reference = server.add(one_layer_image, "it:1")
        store = ImageStore(tmp_path / "store", peers=LayerPeers(addresses=["http://127.0.0.1:9"], key="a key of some"))
        with monkeypatch.context() as patched:
            patched.setattr(LayerPeers, "fetch", half)
            with pytest.raises(ImageError, match="nobody waits"):
                await store.get(reference)
        await store.get(reference)
        assert server.requests[f"/v2/it/blobs/{one_layer_image.layers[0]}"] == 1


async def test_a_record_that_was_cut_off_is_written_again(tmp_path: Path):
    write_layout(tmp_path / "layout", image([layer(member("a"))]))
    name = f"oci:{tmp_path}/layout"
    await ImageStore(tmp_path / "store").get(name)
    [record] = (tmp_path / "store/images").glob("*.json")
    record.write_bytes(b"")  # as after a power cut
    store = ImageStore(tmp_path / "store")
    assert store.images() == []
    await store.get(name)
    assert [listed.references for listed in store.images()] == [[name]]


async def test_a_tag_that_has_moved_is_looked_up_again_once_its_layers_are_gone(tmp_path: Path):
    old, new = image([layer(member("a"))]), image([layer(member("b"))])
    with registry() as server:
        reference, store = server.add(old, "it:1"), ImageStore(tmp_path / "store")
        assert (await store.get(reference)).digest == old.manifest
        server.add(new, "it:1")
        del server.blobs[old.layers[0]]
        await store.prune()
        with pytest.raises(ImageError, match="does not exist"):
            await store.get(reference)
        assert (await store.get(reference)).digest == new.manifest
