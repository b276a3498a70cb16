"""Limits of requests: they drop to what a KV cache holds, and grow again once it has room."""

from forge_rl.services.request_limits import RequestLimit
from forge_rl.token_arrays import CacheUse


def after(limit: RequestLimit, *uses: tuple[float, int]) -> int:
    for usage, fitting in uses:
        limit.note(CacheUse(usage=usage, preemptions=0, waiting=fitting, fitting=fitting))
    return limit.limit


def test_a_limit_drops_to_what_fits_while_others_wait() -> None:
    limit = RequestLimit(64)
    assert after(limit, (0.5, 0)) == 64
    assert after(limit, (1.0, 40)) == 40
    assert after(limit, (1.0, 50)) == 40, "a later report does not raise it"
    assert after(limit, (1.0, 1)) == 1


def test_a_limit_grows_by_a_sixteenth_while_as_many_requests_end_and_only_with_room() -> None:
    limit = RequestLimit(64)
    after(limit, (1.0, 32))
    assert after(limit, *[(0.95, 0)] * 100) == 32, "the cache is full"
    assert after(limit, *[(0.8, 0)] * 32) in (33, 34)
    assert after(limit, *[(0.8, 0)] * 9999) == 64, "not beyond what it had"
    small = RequestLimit(64)
    after(small, (1.0, 1))
    assert after(small, (0.1, 0)) == 2
