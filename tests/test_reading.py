"""Reading slices: each goes to its place, what does not fit is refused, and readers' reports make whole tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge_rl.errors import WeightsError
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import Manifest, TensorSpec, complete, draft
from forge_rl.weights.reading import ReadReport, combine_reports, read_slices
from forge_rl.weights.segment import SegmentBucket, renew, writable
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard
from forge_rl.weights.transports.shared_memory import SharedMemoryTransport
from tests.fake_host import forget, reserve, transport

TENSORS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for seed, (name, shape) in enumerate({"q": (64, 32), "k": (32, 32), "o": (32, 64), "norm": (7,)}.items())
}
FOLDED = {name: tensor.bfloat16() for name, tensor in TENSORS.items()}


@pytest.fixture
def manifest(tmp_path: Path) -> Iterator[Manifest]:
    """Version 3 in bfloat16: q and k in one bucket, o and norm in the next."""
    specs = [TensorSpec(name=name, shape=tuple(tensor.shape)) for name, tensor in TENSORS.items()]
    drafted = reserve(draft(specs, version=3, dtype=torch.bfloat16, bucket_bytes=6 << 10), tmp_path)
    assert [len(drafted.entries(key)) for key in drafted.keys] == [2, 2]
    shards = [
        LocalShard(name=name, tensor_slice=TensorSlice.whole(tensor.shape), values=tensor)
        for name, tensor in TENSORS.items()
    ]
    yield complete(drafted, [asyncio.run(transport().write(drafted, shards, rank=0))])
    forget(drafted)


def read(
    manifest: Manifest,
    wants: dict[str, TensorSlice],
    places: dict[str, torch.Tensor],
    source: SharedMemoryTransport | None = None,
) -> ReadReport:
    return asyncio.run(read_slices(source or transport(), manifest, wants, places.__getitem__))


def empty(size: tuple[int, ...]) -> torch.Tensor:
    return torch.full(size, float("nan"), dtype=torch.bfloat16)


def test_boxes_go_to_their_places_in_a_fused_parameter(manifest: Manifest):
    wants = {
        "q": TensorSlice((32, 0), (32, 32)),
        "k": TensorSlice((16, 0), (16, 32)),
        "o": TensorSlice((0, 32), (32, 32)),
    }
    fused, out = empty((48, 32)), torch.nn.Parameter(empty((32, 32)))
    report = read(manifest, wants, {"q": fused[:32], "k": fused[32:], "o": out})
    assert torch.equal(fused, torch.cat([FOLDED["q"][32:], FOLDED["k"][16:]]))
    assert torch.equal(out, FOLDED["o"][:, 32:])
    assert report.version == 3
    assert report.slices == wants
    assert report.bytes == (32 * 32 + 16 * 32 + 32 * 32) * 2
    assert report.fingerprints == {
        name: fingerprint(tensor_slice.of(FOLDED[name]).contiguous(), FOLDED[name].shape, tensor_slice)
        for name, tensor_slice in wants.items()
    }


def test_the_fingerprints_are_of_what_was_read_not_of_what_was_to_be_there(manifest: Manifest):
    segment = next(bucket.segment for bucket in manifest.buckets if bucket.key == "3/0")
    assert segment is not None
    writable(segment)[100] += 1
    report = read(manifest, {"q": TensorSlice.whole((64, 32))}, {"q": empty((64, 32))})
    assert report.fingerprints["q"] != manifest.tensors[0].fingerprint


def test_a_place_on_another_device_is_written_by_torch(manifest: Manifest):
    place = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")  # has no address: the kernels would crash
    report = read(manifest, {"q": TensorSlice.whole((64, 32))}, {"q": place})
    assert report.fingerprints["q"] == manifest.tensors[0].fingerprint


def test_nothing_wanted_is_nothing_read(manifest: Manifest):
    report = read(manifest, {}, {})
    assert (report.bytes, report.fingerprints) == (0, {})


def test_a_slice_without_elements_is_read_as_nothing(manifest: Manifest):
    tensor_slice = TensorSlice((7,), (0,))
    report = read(manifest, {"norm": tensor_slice}, {"norm": empty((0,))})
    assert (report.bytes, report.fingerprints) == (0, {"norm": 0})


@pytest.mark.parametrize(
    ("wants", "message"),
    [
        ({"q": TensorSlice.whole((64, 32)), "v": TensorSlice.whole((32, 32))}, r"version 3 lacks \['v'\]"),
        ({"q": TensorSlice((32, 0), (33, 32))}, "outside of 'q'"),
        ({"q": TensorSlice((0,), (64,))}, "outside of 'q'"),
        ({"o": TensorSlice((0, 2), (32, 62))}, "begins or ends within 8 bytes"),
    ],
)
def test_a_slice_that_cannot_be_read_is_refused(wants: dict[str, TensorSlice], message: str, manifest: Manifest):
    places = {name: empty(tensor_slice.size) for name, tensor_slice in wants.items()}
    with pytest.raises(WeightsError, match=message):
        read(manifest, wants, places)


@pytest.mark.parametrize(
    "place", [torch.zeros(64, 32), torch.zeros(64, 31, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.bfloat16)]
)
def test_a_place_that_does_not_fit_is_refused_and_not_written(place: torch.Tensor, manifest: Manifest):
    with pytest.raises(WeightsError, match=r"the place for 'q' is .*what is read is \(64, 32\) of torch.bfloat16"):
        read(manifest, {"q": TensorSlice.whole((64, 32))}, {"q": place})
    assert not place.any()


class Freeing(SharedMemoryTransport):
    """Frees each bucket, and uses its segment again, once the reader has it."""

    async def fetch(
        self, manifest: Manifest, names: Collection[str] | None = None
    ) -> AsyncGenerator[SegmentBucket, None]:
        async for bucket in super().fetch(manifest, names):
            asyncio.get_running_loop().call_soon(renew, bucket.segment)
            yield bucket


def test_a_bucket_that_is_freed_while_it_is_read_is_refused(manifest: Manifest):
    with pytest.raises(WeightsError, match="was freed and holds another version"):
        read(manifest, {"q": TensorSlice.whole((64, 32))}, {"q": empty((64, 32))}, Freeing("local", {}))


class Forgetful(SharedMemoryTransport):
    """Ends before the last bucket."""

    async def fetch(
        self, manifest: Manifest, names: Collection[str] | None = None
    ) -> AsyncGenerator[SegmentBucket, None]:
        found = [bucket async for bucket in super().fetch(manifest, names)]
        for bucket in found[:-1]:
            yield bucket


def test_a_tensor_that_did_not_come_is_missed(manifest: Manifest):
    wants = {name: TensorSlice.whole(tensor.shape) for name, tensor in TENSORS.items()}
    places = {name: empty(tuple(tensor.shape)) for name, tensor in TENSORS.items()}
    with pytest.raises(WeightsError, match=r"version 3 did not hold \['norm', 'o'\]"):
        read(manifest, wants, places, Forgetful("local", {}))


def report_of(slices: dict[str, TensorSlice], *, version: int = 3, of: dict[str, torch.Tensor] = FOLDED) -> ReadReport:
    return ReadReport(
        version=version,
        bytes=0,
        slices=slices,
        fingerprints={
            name: fingerprint(tensor_slice.of(of[name]).contiguous(), of[name].shape, tensor_slice)
            for name, tensor_slice in slices.items()
        },
    )


UPPER, LOWER, WHOLE = TensorSlice((0, 0), (16, 32)), TensorSlice((16, 0), (16, 32)), TensorSlice.whole((32, 32))


def test_the_boxes_of_readers_add_up_and_copies_count_once(manifest: Manifest):
    norm = TensorSlice.whole((7,))
    reports = [report_of({"k": half, "norm": norm}) for half in (UPPER, LOWER)]
    expected = {entry.name: entry.fingerprint for entry in manifest.tensors}
    assert combine_reports(reports) == {name: expected[name] for name in ("k", "norm")}
    assert combine_reports(reports[:1])["k"] != expected["k"], "half a tensor passed for all of it"
    assert combine_reports([]) == {}


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([report_of({"k": UPPER}), report_of({"k": LOWER}, version=4)], r"versions \[3, 4\]"),
        ([report_of({"k": UPPER}), report_of({"k": WHOLE})], "'k' that overlap"),
        (
            [report_of({"k": WHOLE}), report_of({"k": WHOLE}, of={"k": FOLDED["k"] + 1})],
            "version 3 hold 'k' with different values",
        ),
    ],
)
def test_reports_that_do_not_go_together_are_refused(reports: list[ReadReport], message: str):
    with pytest.raises(WeightsError, match=message):
        combine_reports(reports)


def test_what_one_reader_got_wrong_is_seen_in_the_sum(manifest: Manifest):
    wrong = report_of({"k": UPPER})
    wrong = replace(wrong, fingerprints={"k": wrong.fingerprints["k"] + 1})
    expected = {entry.name: entry.fingerprint for entry in manifest.tensors}
    assert combine_reports([wrong, report_of({"k": LOWER})])["k"] != expected["k"]
