"""Manifests: a version is whole, or it is refused."""

from dataclasses import replace

import pytest

from forge_rl.errors import WeightsError
from forge_rl.weights.manifest import Manifest, Shard, ShardReport, merge_reports


def report(
    start: int = 0,
    elements: int = 0,
    *,
    name: str = "w",
    shape: tuple[int, ...] = (4, 3),
    dtype: str = "float32",
    fingerprint: int = 0,
    bucket: str = "1/0/0",
) -> ShardReport:
    shard = Shard(bucket=bucket, offset=0, start=start, elements=elements) if elements else None
    return ShardReport(name=name, shape=shape, dtype=dtype, fingerprint=fingerprint, shard=shard)


def test_ranks_together_make_a_whole_tensor():
    manifest = merge_reports(
        7, [[report(6, 6, fingerprint=5, bucket="b")], [report(0, 6, fingerprint=(1 << 64) - 1, bucket="a")]]
    )
    (entry,) = manifest.tensors
    assert (manifest.version, entry.name, entry.shape, entry.dtype) == (7, "w", (4, 3), "float32")
    assert entry.fingerprint == 4
    assert [shard.start for shard in entry.shards] == [0, 6]
    assert manifest.buckets == ("a", "b")


def test_a_rank_may_hold_nothing_of_a_tensor():
    (entry,) = merge_reports(
        1,
        [
            [report(0, 12, fingerprint=9)],
            [
                report(),
            ],
            [report()],
        ],
    ).tensors
    assert len(entry.shards) == 1
    assert entry.fingerprint == 9


def test_bytes_are_counted_by_dtype():
    manifest = merge_reports(
        1, [[report(0, 12, name="a", dtype="bfloat16"), report(0, 12, name="b", dtype="float64"), report(0, 12)]]
    )
    assert [entry.bytes for entry in manifest.tensors] == [24, 96, 48]
    assert manifest.bytes == 168


def test_a_bucket_of_many_tensors_is_named_once():
    first, second = report(0, 12, name="a"), report(0, 12, name="b")
    assert merge_reports(1, [[first, second]]).buckets == ("1/0/0",)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[report(0, 6)], [report(9, 3)]], "leave a gap at element 6"),
        ([[report(3, 9)]], "leave a gap at element 0"),
        ([[report(0, 9)]], "wrote 9 of 12 elements"),
        ([[report()], [report()]], "wrote 0 of 12 elements"),
        ([[report(0, 9)], [report(6, 6)]], "overlap at element 9"),
        ([[report(0, 12)], [report(0, 12)]], "overlap at element 12"),
        ([[report(0, 12)], [report(6, 6)]], "overlap at element 12"),
        ([[report(0, 6)], [report(6, 9)]], "wrote 15 of 12 elements"),
    ],
)
def test_a_tensor_that_was_not_written_exactly_once_is_refused(ranks: list, said: str):
    with pytest.raises(WeightsError, match=said) as caught:
        merge_reports(3, ranks)
    assert "'w' for version 3" in caught.value.message


@pytest.mark.parametrize("change", [{"name": "v"}, {"shape": (12,)}, {"dtype": "bfloat16"}])
def test_ranks_that_disagree_are_refused(change: dict):
    with pytest.raises(WeightsError, match="disagree on 'w' of version 3"):
        merge_reports(3, [[report(0, 6)], [replace(report(6, 6), **change)]])


def test_ranks_with_different_numbers_of_tensors_are_refused():
    with pytest.raises(WeightsError, match="different numbers of tensors for version 3"):
        merge_reports(3, [[report(0, 6)], [report(6, 6), report(0, 12, name="v")]])


@pytest.mark.parametrize("ranks", [[], [[]], [[], []]])
def test_a_version_without_tensors_is_refused(ranks: list):
    with pytest.raises(WeightsError, match="version 3 holds no tensors"):
        merge_reports(3, ranks)


def test_an_empty_manifest_has_no_bytes():
    assert Manifest(version=0, tensors=()).bytes == 0
    assert Manifest(version=0, tensors=()).buckets == ()
