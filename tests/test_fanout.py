"""Where hosts are placed to copy a version: few copies leave its writer, nobody waits in a circle, failures heal."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_rl.errors import WeightsError
from forge_rl.weights.fanout import Fanout, most_children
from forge_rl.weights.manifest import Bucket


def buckets(count: int, version: str = "7", writer: str = "w") -> list[Bucket]:
    dot = "." if "/" in version else "/"
    return [Bucket(key=f"{version}{dot}{number}", bytes=1, host=writer) for number in range(count)]


def steps_to_writer(parents: dict[str, str], host: str) -> int:
    steps = 0
    while host != "w":
        host, steps = parents[host], steps + 1
        assert steps <= len(parents), "hosts wait for one another in a circle"
    return steps


@pytest.mark.parametrize("hosts", [1, 2, 8, 256])
@pytest.mark.parametrize("count", [1, 4, 1000])
def test_at_most_two_copies_leave_the_writer_and_the_way_is_short(hosts: int, count: int):
    fanout = Fanout(hosts + 1)
    placed = {f"h{i}": set(fanout.join(f"h{i}", buckets(count)).values()) for i in range(hosts)}
    parents = {host: parents_of_host.pop() for host, parents_of_host in placed.items()}
    assert not any(placed.values()), "a host copies all of a version from one other"
    max_children = most_children(hosts, count)
    assert max(Counter(parents.values()).values()) <= max_children
    longest = max(steps_to_writer(parents, host) for host in parents)
    assert longest == (hosts if max_children == 1 else math.ceil(math.log2(hosts + 2)) - 1)
    assert fanout.join("h0", buckets(count)) == dict.fromkeys((b.key for b in buckets(count)), parents["h0"])


def test_many_hosts_make_a_tree_and_many_buckets_a_chain():
    # 4 buckets to 256 hosts: a chain takes 4 + 256 - 1 steps, a tree of 8 levels 2 * (4 + 8 - 1).
    assert most_children(256, 4) == 2
    assert most_children(256, 1000) == 1  # 1255 steps, not 2014
    assert most_children(8, 4) == 1  # 11 steps, not 12


def test_children_of_a_failed_host_read_from_other_hosts():
    fanout = Fanout(100)  # a tree: w <- a, b; a <- c, d
    for host, parent in (("a", "w"), ("b", "w"), ("c", "a"), ("d", "b"), ("e", "a")):
        assert set(fanout.join(host, buckets(1)).values()) == {parent}
    assert fanout.join("c", buckets(1), failed=["a"]) == {"7/0": "w"}
    assert fanout.join("e", buckets(1), failed=["a"]) == {"7/0": "c"}
    assert "a" not in {*fanout.join("f", buckets(1)).values(), *fanout.join("g", buckets(1)).values()}
    assert fanout.join("a", buckets(1), failed=["w"])["7/0"] not in ("a", "w")
    with pytest.raises(WeightsError, match="no other host than 'w' has these weights"):
        Fanout(2).join("a", buckets(1), failed=["w"])


def test_copies_that_nobody_needs_are_given_back_by_their_host_alone():
    fanout = Fanout(3)
    old, new = buckets(2), buckets(2, "8/1")
    for host in ("a", "b"):
        fanout.join(host, old)
    fanout.join("a", new)
    assert fanout.stale("a", {old[1].key, *(b.key for b in new)}) == ()
    assert sorted(fanout.stale("a", {b.key for b in new})) == ["7/0", "7/1"]
    assert fanout.join("c", old) == {"7/0": "b", "7/1": "b"}
    fanout.leave("b")
    fanout.forget([b.key for b in old])
    assert fanout.join("b", new) == {"8/1.0": "a", "8/1.1": "a"}


@given(st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 9), max_size=4)), max_size=60), st.booleans())
def test_whoever_fails_nobody_waits_in_a_circle(events: list[tuple[int, set[int]]], chain: bool):
    fanout, count = Fanout(11), 100 if chain else 1
    parents: dict[str, str] = {}
    for number, failed in events:
        host = f"h{number}"
        names = {f"h{number_failed}" for number_failed in failed - {number} if f"h{number_failed}" in parents}
        (parents[host],) = set(fanout.join(host, buckets(count), failed=names).values())
        assert parents[host] not in names
        ancestor, ancestors = host, {host}
        while ancestor in parents:  # a parent that was passed over may still be waited for, but leads on as well
            ancestor = parents[ancestor]
            assert ancestor not in ancestors
            ancestors.add(ancestor)
        assert ancestor == "w"
