"""Constraints that crash or hang what compiles them, and the process in which they are tried."""

from __future__ import annotations

import asyncio

import pytest

from forge_rl.gateway.constraints import ConstraintChecker, TrialLimits
from forge_rl.gateway.errors import ApiError
from tests.fake_backend import tokenizer


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ('root ::= ((a{1, 3000}))\na ::= (("x"))', ""),
        ('root ::= ((a{0, 8}))\na ::= ("" | ("x"))', ""),
        ('root ::= ((a{1, 9}))\na ::= ("" | ("x"))', "up to 9 times"),
        ("root ::= ((b{1, 3}))\nb ::= ((a{1, 3}))\na ::= (([x]*))", "up to 9 times"),
        ('root ::= ((b{1, 9}))\nb ::= ((a a))\na ::= ((c{0, 5}))\nc ::= (("x"))', "up to 9 times"),
        ('root ::= (("{1, 9}" a))\na ::= ("" | ("x" a))', ""),
        ('root ::= ((a{1, 9} "x"))\na ::= ((root) | ("y" a))', ""),
        ('root ::= ((b{1, 90000}))\nb ::= ((a{1, 90000}))\na ::= (("x"))', "multiply to 8100000000"),
        ('root ::= ((a{2, -1}))\na ::= (("x"))', ""),
    ],
)
def test_repeats_are_bounded_over_rules(rules: str, problem: str):
    from forge_rl.gateway.constraint_worker import repeats_too_much  # imports transformers, by way of xgrammar

    reason = repeats_too_much(rules)
    assert (problem in reason) if problem else not reason, reason


async def test_one_that_hangs_is_refused_and_its_process_can_be_killed(
    monkeypatch: pytest.MonkeyPatch, nothing_left: None, high_descriptors: None
):
    checked_texts: list[str] = []

    checker = ConstraintChecker(tokenizer(), TrialLimits(wall_s=60, read_s=1, compile_s=1, walk_s=5))
    trial = checker._try

    def counted(kind: str, text: str) -> str:
        checked_texts.append(text)
        return trial(kind, text)

    monkeypatch.setattr(checker, "_try", counted)
    try:
        for _ in range(2):
            with pytest.raises(ApiError, match="it takes too long"):
                await checker.check("ebnf", "root ::= " + "[a-zA-Z ]* " * 2000)
        await asyncio.gather(*[checker.check("regex", "[a-z]{3}") for _ in range(9)])
        assert len(checked_texts) == 2, "verdicts are kept, and the same is not tried twice at a time"

        assert checker._process is not None
        checker._process.kill()
        checker._process.wait()
        await checker.check("regex", "[a-z]{4}")
    finally:
        await checker.close()


async def test_a_caller_with_many_constraints_delays_others_by_one(
    monkeypatch: pytest.MonkeyPatch,
):
    checked_texts: list[str] = []

    def note(kind: str, text: str) -> str:
        checked_texts.append(text)
        return ""

    checker = ConstraintChecker(tokenizer())
    monkeypatch.setattr(checker, "_try", note)
    many = [asyncio.ensure_future(checker.check("regex", f"many{number}", "many")) for number in range(17)]
    await asyncio.gather(checker.check("regex", "other", "other"), return_exceptions=True)
    errors = await asyncio.gather(*many, return_exceptions=True)
    assert checked_texts == ["many0", "other", *(f"many{number}" for number in range(1, 16))]
    assert [str(error) for error in errors if error is not None] == [str(errors[16])]
    assert isinstance(errors[16], ApiError)
    assert errors[16].status == 503
    assert not checker._callers, "nothing is kept of a caller that has gone"
    await checker.close()
    with pytest.raises(ApiError, match="was closed"):
        await checker.check("regex", "later", "other")
