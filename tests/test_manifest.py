"""Manifests: how a version is laid out in buckets, and that it is whole, or refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_rl.errors import AttestationError, WeightsError
from forge_rl.weights.manifest import (
    Bucket,
    Manifest,
    Piece,
    ShardReport,
    TensorEntry,
    TensorSpec,
    combine_shards,
    complete,
    draft,
    is_of,
)
from forge_rl.weights.slices import TensorSlice

MODEL = {"a": (4, 3), "b": (5,), "c": (), "d": (8, 4)}


def specs(*, changed: tuple[str, ...] = tuple(MODEL), **shapes: tuple[int, ...]) -> list[TensorSpec]:
    return [TensorSpec(name=name, shape=shape, changed=name in changed) for name, shape in {**MODEL, **shapes}.items()]


def reports(drafted: Manifest, fingerprint: int = 1) -> list[ShardReport]:
    """Reports of one rank that holds all."""
    return [
        ShardReport(name=entry.name, tensor_slice=TensorSlice.whole(entry.shape), fingerprint=fingerprint)
        for entry in drafted.tensors
        if is_of(entry.bucket, drafted.version)
    ]


def published(version: int = 1, dtype: torch.dtype = torch.float32, bucket_bytes: int = 128) -> Manifest:
    drafted = draft(specs(), version=version, dtype=dtype, bucket_bytes=bucket_bytes)
    return complete(drafted, [reports(drafted)])


def places(manifest: Manifest) -> list[tuple[str, int]]:
    return [(entry.bucket, entry.offset) for entry in manifest.tensors]


def test_a_bucket_is_filled_before_the_next_begins():
    # 48, 20, 4 and 128 bytes, each aligned to 64: two fit in 128, the third begins a bucket, the last one its own.
    manifest = published()
    assert places(manifest) == [("1/0", 0), ("1/0", 64), ("1/1", 0), ("1/2", 0)]
    assert [(bucket.key, bucket.bytes) for bucket in manifest.buckets] == [("1/0", 128), ("1/1", 64), ("1/2", 128)]
    assert [entry.bytes for entry in manifest.tensors] == [48, 20, 4, 128]
    assert manifest.bytes == 200
    assert manifest.keys == ("1/0", "1/1", "1/2")
    assert manifest.written == manifest.buckets


def test_a_tensor_larger_than_a_bucket_has_one_of_its_own():
    drafted = draft(specs(b=(1000,)), version=2, dtype=torch.bfloat16, bucket_bytes=128)
    assert places(drafted) == [("2/0", 0), ("2/1", 0), ("2/2", 0), ("2/2", 64)]
    assert [bucket.bytes for bucket in drafted.buckets] == [64, 2048, 128]


def test_all_of_a_small_model_is_one_bucket():
    assert published(bucket_bytes=1 << 20).keys == ("1/0",)


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bucket_bytes=st.integers(1, 600),
)
@settings(max_examples=100, deadline=None)
def test_tensors_lie_whole_and_apart_in_buckets_of_the_given_size(sizes, dtype, bucket_bytes):
    drafted = draft(
        [TensorSpec(name=f"w{i}", shape=(size,)) for i, size in enumerate(sizes)],
        version=3,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
    )
    assert [entry.numel for entry in drafted.tensors] == sizes
    for bucket in drafted.buckets:
        entries = drafted.entries[bucket.key]
        assert entries, "a bucket holds something"
        end = 0
        for entry in entries:
            assert entry.offset >= end
            assert entry.offset % 64 == 0
            end = entry.offset + entry.bytes
        assert end <= bucket.bytes < end + 64
        assert len(entries) == 1 or end <= bucket_bytes
    assert sorted(e.name for b in drafted.buckets for e in drafted.entries[b.key]) == sorted(
        entry.name for entry in drafted.tensors
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_entries_are_views_of_their_bucket(dtype: torch.dtype):
    drafted = draft(specs(), version=1, dtype=dtype, bucket_bytes=1 << 20)
    (bucket,) = drafted.buckets
    memory = torch.zeros(bucket.bytes, dtype=torch.uint8)
    for number, entry in enumerate(drafted.tensors):
        view = entry.of(memory)
        assert (tuple(view.shape), view.dtype) == (entry.shape, dtype)
        assert view.untyped_storage().data_ptr() == memory.data_ptr()
        view.fill_(number + 1)
    for number, entry in enumerate(drafted.tensors):
        assert (entry.of(memory) == number + 1).all(), "no two overlap"
    assert int((memory != 0).sum()) <= drafted.bytes


def test_what_has_not_changed_stays_where_it_was():
    base = published()
    drafted = draft(specs(changed=("b", "d")), version=2, dtype=torch.float32, base=base, bucket_bytes=1 << 20)
    assert places(drafted) == [("1/0", 0), ("2/0", 0), ("1/1", 0), ("2/0", 64)]
    assert drafted.keys == ("2/0", "1/0", "1/1")
    assert drafted.written == (Bucket(key="2/0", bytes=192),)
    manifest = complete(drafted, [reports(drafted, fingerprint=7)])
    assert [entry.fingerprint for entry in manifest.tensors] == [1, 7, 1, 7]
    assert [entry.name for entry in manifest.entries["1/0"]] == ["a"]

    # A third shares with both.
    third = draft(specs(changed=("a",)), version=3, dtype=torch.float32, base=manifest, bucket_bytes=1 << 20)
    assert third.keys == ("3/0", "2/0", "1/1")
    assert complete(third, [reports(third)]).bytes == base.bytes


def test_when_nothing_has_changed_nothing_is_written():
    base = published()
    drafted = draft(specs(changed=()), version=2, dtype=torch.float32, base=base)
    assert drafted.written == ()
    assert (complete(drafted, []).tensors, drafted.buckets) == (base.tensors, base.buckets)


@pytest.mark.parametrize(
    ("wanted", "dtype", "base"),
    [
        (specs(changed=(), a=(3, 4)), torch.float32, published()),
        (specs(changed=(), a=(12,)), torch.float32, published()),
        (specs(changed=()), torch.bfloat16, published()),
        (specs(changed=()), torch.float32, None),
        ([TensorSpec(name="new", shape=(4, 3), changed=False)], torch.float32, published()),
    ],
)
def test_what_the_base_does_not_hold_alike_is_written(wanted: list[TensorSpec], dtype: torch.dtype, base):
    drafted = draft(wanted, version=2, dtype=dtype, base=base)
    assert is_of(drafted.tensors[0].bucket, 2)


def test_a_version_is_told_from_one_whose_number_begins_alike():
    assert is_of("1/0", 1)
    assert not is_of("11/0", 1)
    assert not is_of("1/0", 11)


def test_ranks_together_make_a_whole_tensor():
    drafted = draft([TensorSpec(name="w", shape=(4, 3))], version=7, dtype=torch.float32)
    pieces = [Piece(tensor_slice=TensorSlice((row, 0), (2, 3)), part=f"7/0/{row}", offset=0) for row in (2, 0)]
    manifest = complete(
        drafted,
        [
            [ShardReport(name="w", tensor_slice=pieces[0].tensor_slice, fingerprint=5, piece=pieces[0])],
            [ShardReport(name="w", tensor_slice=pieces[1].tensor_slice, fingerprint=(1 << 64) - 1, piece=pieces[1])],
            [],
        ],
    )
    assert manifest.tensors == (
        TensorEntry(
            name="w", shape=(4, 3), dtype="float32", bucket="7/0", offset=0, fingerprint=4, pieces=tuple(pieces)
        ),
    )
    assert (manifest.version, manifest.buckets) == (7, drafted.buckets)


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([TensorSlice((0, 0), (2, 3)), TensorSlice((3, 0), (1, 3))], "they hold 9 of 12 elements"),
        ([], "they hold 0 of 12 elements"),
        ([TensorSlice((0, 0), (3, 3)), TensorSlice((2, 0), (2, 3))], "overlaps"),
        ([TensorSlice((0, 0), (4, 3)), TensorSlice((0, 0), (4, 3))], "overlaps"),
        ([TensorSlice((0, 0), (4, 4))], "reaches outside"),
    ],
)
def test_a_tensor_that_was_not_written_exactly_once_is_refused(slices: list[TensorSlice], message: str):
    drafted = draft(specs(), version=3, dtype=torch.float32)
    ranks = [[ShardReport(name="a", tensor_slice=tensor_slice, fingerprint=0)] for tensor_slice in slices]
    ranks.append([report for report in reports(drafted) if report.name != "a"])
    with pytest.raises(WeightsError, match=message) as caught:
        complete(drafted, ranks)
    assert "'a' for version 3" in caught.value.message


def test_what_was_not_to_be_written_is_refused():
    drafted = draft(specs(), version=3, dtype=torch.float32)
    more = ShardReport(name="z", tensor_slice=TensorSlice((0,), (1,)), fingerprint=0)
    with pytest.raises(WeightsError, match=r"version 3 was not to hold \['z'\]"):
        complete(drafted, [reports(drafted), [more]])
    # Nor what stays where an older version has it.
    drafted = draft(specs(changed=("b",)), version=4, dtype=torch.float32, base=published())
    second_report = ShardReport(name="a", tensor_slice=TensorSlice.whole((4, 3)), fingerprint=0)
    with pytest.raises(WeightsError, match=r"version 4 was not to hold \['a'\]"):
        complete(drafted, [[*reports(drafted), second_report]])


def test_a_version_without_tensors_is_refused():
    with pytest.raises(WeightsError, match="version 3 holds no tensors"):
        draft([], version=3, dtype=torch.float32)


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(WeightsError, match="version 3 holds two tensors of one name"):
        draft([*specs(), TensorSpec(name="a", shape=(1,))], version=3, dtype=torch.float32)


def test_attestation_names_the_tensors_that_differ():
    entries = tuple(
        TensorEntry(name=name, shape=(2,), dtype="float32", bucket="1/0", offset=64 * number, fingerprint=number)
        for number, name in enumerate("abc")
    )
    manifest = Manifest(version=1, tensors=entries, buckets=())
    manifest.attest({"a": 0, "b": 1, "c": 2}, "an engine")
    with pytest.raises(
        AttestationError, match="an engine holds other weights than version 1: 1 of 3 tensors differ: b"
    ):
        manifest.attest({"a": 0, "b": 7, "c": 2}, "an engine")
    with pytest.raises(AttestationError, match="2 of 3 tensors differ: b, c"):
        manifest.attest({"a": 0}, "an engine")


UPPER, LOWER, WHOLE = TensorSlice((0, 0), (16, 32)), TensorSlice((16, 0), (16, 32)), TensorSlice.whole((32, 32))


def held(tensor_slice: TensorSlice, fingerprint: int) -> ShardReport:
    return ShardReport(name="k", tensor_slice=tensor_slice, fingerprint=fingerprint)


def test_slices_of_readers_add_up_and_copies_count_once():
    norm = ShardReport(name="norm", tensor_slice=TensorSlice.whole((7,)), fingerprint=5)
    upper, lower = held(UPPER, (1 << 64) - 1), held(LOWER, 3)
    assert combine_shards([upper, norm, lower, norm], version=3) == {"k": 2, "norm": 5}
    assert combine_shards([], version=3) == {}


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([held(UPPER, 1), held(WHOLE, 2)], "'k' that overlap"),
        ([held(WHOLE, 1), held(WHOLE, 2)], "version 3 hold 'k' with different values"),
    ],
)
def test_reports_that_do_not_go_together_are_refused(shards: list[ShardReport], message: str):
    with pytest.raises(WeightsError, match=message):
        combine_shards(shards, version=3)
