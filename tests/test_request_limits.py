"""Limits of requests: they drop to what a KV cache holds, and grow again once it has room."""

from forge_rl.services.request_limits import RequestLimit, RequestLimits
from forge_rl.token_arrays import CacheUse


class Engine:
    """An engine, by its identity alone."""


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


def test_a_limit_grows_by_a_sixteenth_and_only_with_room() -> None:
    limit = RequestLimit(64)
    after(limit, (1.0, 32))
    assert after(limit, *[(0.95, 0)] * 100) == 32, "the cache is full"
    assert after(limit, *[(0.8, 0)] * 32) in (33, 34)
    assert after(limit, *[(0.8, 0)] * 9999) == 64, "not beyond what it had"
    small = RequestLimit(64)
    after(small, (1.0, 1))
    assert after(small, (0.1, 0)) == 2


def test_prefix_hits_and_repeated_prefills_are_summed_over_engines() -> None:
    limits = RequestLimits(64)
    engines = [Engine(), Engine()]
    for engine, cached in zip(engines, (10, 30), strict=True):
        use = CacheUse(0.5, 0, 0, 0, prompt_tokens=100, cached_tokens=cached, prefilled_again=7, transferred_tokens=4)
        limits.note(engine, use)  # type: ignore[arg-type]
    metrics = limits.pop_metrics()
    assert (metrics["generator/prefix_hits"], metrics["generator/prefilled_again"]) == (0.2, 14)
    assert metrics["generator/transferred_tokens"] == 8
    limits.note(engines[0], CacheUse(0.5, 0, 0, 0))  # type: ignore[arg-type]
    metrics = limits.pop_metrics()
    assert not {"generator/prefix_hits", "generator/transferred_tokens"} & metrics.keys(), "no request started"
    assert metrics["generator/prefilled_again"] == 0
