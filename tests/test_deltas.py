"""Versions at an fsspec address: put together bit for bit, small, whole or not at all, and harmless if hostile."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_rl.errors import WeightsError
from forge_rl.weights.delta_codec import apply_change, decode_whole, encode, words_of
from forge_rl.weights.deltas import DeltaPublisher, DeltaSubscriber
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import Manifest, TensorEntry, draft
from tests.conftest import edited
from tests.s3 import S3


class Held:
    """A transport of one bucket that holds these tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def manifest(self, version: int) -> Manifest:
        entries = [
            TensorEntry(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                bucket="",
                offset=0,
                fingerprint=fingerprint(tensor, tensor.shape),
            )
            for name, tensor in self.tensors.items()
        ]
        return Manifest(version=version, tensors=tuple(entries), buckets=())

    async def fetch(self, manifest: Manifest) -> AsyncGenerator[Any, None]:
        yield SimpleNamespace(entries=manifest.tensors, open=lambda: contextlib.nullcontext(self.tensors))


def first() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(200, 64).to(torch.bfloat16),
        "norm": torch.randn(7),
        "scale": torch.tensor(1.5, dtype=torch.float16),
        "nothing": torch.zeros(0, 4, dtype=torch.bfloat16),
    }


def step(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Change a few elements of the largest tensor, to neighbours, NaN and -0."""
    torch.manual_seed(seed)
    bits = tensors["embed"].clone().view(torch.int16)
    bits.view(-1)[torch.randint(0, bits.numel(), (100,))] += 1
    bits[0, 0], bits[1, 1] = 0x7FC1, -0x8000
    return tensors | {"embed": bits.view(torch.bfloat16)}


def publish(publisher: DeltaPublisher, version: int, tensors: dict[str, torch.Tensor]) -> int:
    source = Held(tensors)
    return asyncio.run(publisher.publish(source.manifest(version), source))  # type: ignore[arg-type]


def equal(subscriber: DeltaSubscriber, tensors: dict[str, torch.Tensor]) -> bool:
    return subscriber.tensors.keys() == tensors.keys() and all(
        tensor.shape == tensors[name].shape and bool((words_of(tensor) == words_of(tensors[name])).all())
        for name, tensor in subscriber.tensors.items()
    )


def test_a_store_that_lacks_an_update_writes_what_that_changed_too(address: str):
    publisher, follower = DeltaPublisher(address), DeltaSubscriber(address)
    tensors = first()
    publish(publisher, 1, tensors)
    assert follower.update()
    drafted = draft(follower.specs, version=1, dtype=torch.bfloat16)
    entries = Held(follower.tensors).manifest(1).tensors
    base = replace(
        drafted,
        tensors=tuple(
            replace(entry, fingerprint=attested.fingerprint)
            for entry, attested in zip(drafted.tensors, entries, strict=True)
        ),
    )
    early, late = list(tensors)[:2]
    for version, name in ((2, early), (3, late)):  # the store did not get version 2
        tensors = tensors | {name: tensors[name] + 1}
        publish(publisher, version, tensors)
        assert follower.update()
    assert [spec.name for spec in follower.specs if spec.changed] == [late]
    drafted = draft(follower.specs, version=3, dtype=torch.bfloat16, base=base)
    new_buckets = {bucket.key for bucket in drafted.written}
    assert {entry.name for entry in drafted.tensors if entry.bucket in new_buckets} >= {early, late}


def test_each_version_is_put_together_bit_for_bit_from_what_changed(address: str):
    publisher, follower = DeltaPublisher(address, full_every=3), DeltaSubscriber(address)
    assert not follower.update()
    tensors = first()
    full = publish(publisher, 1, tensors)
    for version in range(2, 9):
        tensors = step(tensors, version)
        written_bytes = publish(publisher, version, tensors)
        assert (written_bytes > full / 2) == (version in (4, 7)), "every third one is full"
        if version % 2:  # a follower may miss versions; a late one begins at a full version
            late = DeltaSubscriber(address)
            for reader in (follower, late):
                assert reader.update()
                assert not reader.update()
                assert (reader.version, equal(reader, tensors)) == (version, True)
    assert {spec.name for spec in follower.specs if spec.changed} >= {"embed"}
    assert [shard.name for shard in follower.shards()] == list(tensors)
    files, root = fsspec.url_to_fs(address, skip_instance_cache=True)
    versions = sorted({int(path.rpartition("/")[2][:10]) for path in files.ls(root, detail=False)})
    assert versions == [3, 4, 5, 6, 7], "two full versions are kept, with their changes"

    # A run that is started again writes a full version, whatever its number, and followers go on.
    publish(DeltaPublisher(address), 2, first())
    assert follower.update()
    assert (follower.version, equal(follower, first())) == (2, True)


@given(
    st.lists(st.integers(0, 65535), min_size=1, max_size=300),
    st.lists(st.tuples(st.integers(0, 299), st.integers(0, 65535)), max_size=40),
)
def test_whatever_changes_comes_back(values: list[int], changes: list[tuple[int, int]]):
    old = np.array(values, "<u2")
    new = old.copy()
    for index, value in changes:
        new[index % len(new)] = value
    change, decoded_values = encode(new, old), old.copy()
    if change.kind == "whole":
        decoded_values = decode_whole(memoryview(change.data), numel=len(new), item_bytes=2)
    elif change.kind == "changed":
        apply_change(memoryview(change.data), decoded_values, changes=change.changes, gap_bytes=change.gap_bytes)
    assert (decoded_values == new).all()


@pytest.mark.parametrize(("numel", "item_bytes"), [(1, 2), (1, 4), (3, 1)])
def test_a_whole_tensor_is_a_copy_that_later_changes_may_write_to(numel: int, item_bytes: int):
    values = np.arange(numel).astype(f"<u{item_bytes}")
    words = decode_whole(memoryview(encode(values, None).data), numel=numel, item_bytes=item_bytes)
    assert words.tolist() == values.tolist()
    assert words.flags.writeable


def test_a_version_of_another_model_or_too_large_is_refused(address: str):
    publish(DeltaPublisher(address), 1, first())
    with pytest.raises(WeightsError, match="differ from the model"):
        DeltaSubscriber(address, expected={"embed": (200, 32)}).update()
    with pytest.raises(WeightsError, match="at most 100 are taken"):
        DeltaSubscriber(address, most_bytes=100).update()
    with pytest.raises(WeightsError, match=r"--weights\.mirror is an address that fsspec cannot open"):
        DeltaPublisher("nosuch://x")


def spoil_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "0000000001.json"
        header = json.loads(path.read_text())
        change(header)
        path.write_text(json.dumps(header))

    return spoil


def spoil_part(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    path = "0000000001-000.bin"
    return lambda folder: (folder / path).write_bytes(change((folder / path).read_bytes())) and None


def largest(header: dict[str, Any]) -> dict[str, Any]:
    return next(tensor for tensor in header["tensors"] if tensor["name"] == "embed")


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda folder: (folder / "0000000001.json").write_bytes(b""), "cannot be used"),
    "no JSON": (lambda folder: (folder / "0000000001.json").write_text("[" * 100_000), "cannot be used"),
    "an escape": (spoil_header(lambda h: h.update({"\x1b[2J": 1})), r"at \\x1b\[2J"),
    "huge": (spoil_header(lambda h: largest(h).update(shape=[1 << 40, 64])), "at most"),
    "beyond": (spoil_header(lambda h: largest(h).update(shape=[1 << 60, 1 << 60])), "cannot be used"),
    "negative": (spoil_header(lambda h: largest(h).update(offset=-1)), "cannot be used"),
    "twice": (spoil_header(lambda h: h["tensors"].append(h["tensors"][0])), "two tensors of one name"),
    "a circle": (spoil_header(lambda h: h.update(base=1)), "it changes a later version"),
    "another shape": (
        spoil_header(lambda h: largest(h).update(shape=[64, 200])),
        "differ from those in the version",
    ),
    "nothing there": (spoil_header(lambda h: largest(h).update(part=7)), "does not hold 'embed'"),
    "too many": (spoil_header(lambda h: largest(h).update(changes=200 * 64 + 1)), "is torn"),
    "a bomb": (spoil_header(lambda h: largest(h).update(changes=200 * 64)), "is torn"),
    "wide": (spoil_header(lambda h: largest(h).update(gap_bytes=4)), "is torn"),
    "other weights": (spoil_header(lambda h: largest(h).update(fingerprint=1)), "1 of 4 tensors differ: embed"),
    "unchanged": (spoil_header(lambda h: h["tensors"][1].update(fingerprint=1)), "1 of 4 tensors differ: norm"),
    "cut": (spoil_part(lambda data: data[:-1]), "has not"),
    "longer": (spoil_part(lambda data: data + b"x"), "has not"),
    "zeros": (spoil_part(lambda data: bytes(len(data))), "is torn"),
    "gone": (lambda folder: (folder / "0000000001-000.bin").unlink(), "lacks a file"),
}


@pytest.mark.parametrize(
    ("address", "damage"),
    [*(("file", how) for how in SPOILT), *(("s3", how) for how in ("no JSON", "empty", "cut", "longer", "gone"))],
    indirect=["address"],
)
def test_torn_or_hostile_changes_are_refused_until_a_full_version(damage: str, address: str, tmp_path: Path):
    spoil, message = SPOILT[damage]
    publisher, follower = DeltaPublisher(address, full_every=2), DeltaSubscriber(address)
    publish(publisher, 1, first())
    assert follower.update()
    publish(publisher, 2, step(first(), 1))
    with edited(address, tmp_path / "edited") as folder:
        spoil(folder)
    with pytest.raises(WeightsError, match=message):
        follower.update()
    assert (follower.version, follower.tensors) == (None, {})
    publish(publisher, 3, step(first(), 2))
    assert follower.update()
    assert (follower.version, equal(follower, step(first(), 2))) == (3, True)


def test_no_flipped_bit_passes(tmp_path: Path):
    draw = random.Random(0)
    publisher = DeltaPublisher(str(tmp_path))
    publish(publisher, 1, first())
    publish(publisher, 2, step(first(), 1))
    part = tmp_path / "0000000001-000.bin"
    intact_bytes = part.read_bytes()
    for _ in range(200):
        torn = bytearray(intact_bytes)
        torn[draw.randrange(len(torn))] ^= 1 << draw.randrange(8)
        part.write_bytes(torn)
        follower = DeltaSubscriber(str(tmp_path))
        try:
            follower.update()
        except WeightsError:
            continue
        assert equal(follower, step(first(), 1)), "a bit that decoding ignores"


def test_a_failed_write_leaves_nothing_and_the_next_version_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    publisher, follower = DeltaPublisher(str(tmp_path)), DeltaSubscriber(str(tmp_path))
    publish(publisher, 1, first())
    with monkeypatch.context() as patch:
        patch.setattr(publisher._folder, "write", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            publish(publisher, 2, step(first(), 1))
    assert follower.update()
    assert follower.version == 1
    publish(publisher, 3, step(first(), 1))
    assert DeltaSubscriber(str(tmp_path)).update()
    assert follower.update()
    assert (follower.version, equal(follower, step(first(), 1))) == (3, True)


@pytest.mark.parametrize("kind", ["SlowDown", "InternalError", "reset"])
def test_versions_outlive_single_failures_of_a_store(kind: str, s3: S3):
    publisher, follower = DeltaPublisher("s3://bucket/run"), DeltaSubscriber("s3://bucket/run")
    for request in (("PUT", "0000000000-000.bin"), ("PUT", "0000000000.json"), ("GET", "list-type=2")):
        s3.fails(*request, kind)
    publish(publisher, 1, first())
    assert len(s3.struck) == 3
    for request in (("GET", "0000000000-000.bin"), ("GET", "0000000000.json"), ("HEAD", "0000000000.json")):
        s3.fails(*request, kind)
    assert follower.update()
    assert len(s3.struck) == 6
    assert (follower.version, equal(follower, first())) == (1, True)


@pytest.mark.parametrize("file", ["-000.bin", ".json"])
def test_a_refused_or_withheld_version_leaves_the_old_one(file: str, s3: S3):
    publisher, follower = DeltaPublisher("s3://bucket/run"), DeltaSubscriber("s3://bucket/run")
    publish(publisher, 1, first())
    assert follower.update()
    s3.fails("PUT", f"0000000001{file}", "reset", times=100)
    with pytest.raises(OSError, match="endpoint"):
        publish(publisher, 2, step(first(), 1))
    s3.fails_no_more()
    assert not follower.update()
    publish(publisher, 3, step(first(), 1))
    s3.fails("GET", f"0000000002{file}", "InternalError", times=100)
    with pytest.raises(OSError, match="told to"):
        follower.update()
    assert follower.version == (None if file == "-000.bin" else 1), "it had begun to change"
    assert equal(follower, first()) == (follower.version == 1)
    s3.fails_no_more()
    assert follower.update()
    assert (follower.version, equal(follower, step(first(), 1))) == (3, True)


def test_a_listing_that_lags_gives_an_older_version_or_an_error(s3: S3):
    publisher = DeltaPublisher("s3://bucket/run", full_every=1)
    follower, late = DeltaSubscriber("s3://bucket/run"), DeltaSubscriber("s3://bucket/run")
    publish(publisher, 1, first())
    s3.lags = True
    assert follower.update()
    publish(publisher, 2, step(first(), 1))
    assert not follower.update()
    assert late.update()
    assert (late.version, equal(late, first())) == (1, True)
    s3.lags = False
    publish(publisher, 3, step(first(), 2))  # removes the first
    s3.lags = True
    with pytest.raises(WeightsError, match="lacks a file"):
        DeltaSubscriber("s3://bucket/run").update()
    s3.lags = False
    for reader in (follower, late):
        assert reader.update()
        assert (reader.version, equal(reader, step(first(), 2))) == (3, True)
