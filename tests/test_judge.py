"""The LLM judge, against a local endpoint that misbehaves in every way."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge_rl.errors import ConfigError, ForgeError, JudgeError, SpendingError, TaskError, UngradedError
from forge_rl.rewards import judge as judge_module
from forge_rl.rewards.judge import Judge, _asked_wait_s
from forge_rl.rewards.judge_store import JudgeStore
from forge_rl.rewards.protocol import Form
from forge_rl.rewards.scorer import score_again
from forge_rl.types import Episode, Score, Task
from tests.judge_server import drip, hang_up, judge_server, raw, reply

TASK = Task(id="t", source="s", messages=({"role": "user", "content": "2+3?"},), truth={"answer": "5"})


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "_FIRST_WAIT_S", 0.01)


def judge_of(url: str, **settings: Any) -> Judge:
    return Judge(**{"model": "m", "base_url": url, "api_key_env": "", "timeout_s": 60.0, **settings})


def grade(judge: Judge, *answers: str, folder: Path | None = None) -> list[Score]:
    """Grade answers side by side, in a process's place."""

    async def main() -> Sequence[Score]:
        copy: Judge = pickle.loads(pickle.dumps(judge))
        copy.load(folder)
        episodes = [Episode(task=TASK, turns=(), output=answer) for answer in answers]
        return await asyncio.gather(*(copy(TASK, episode) for episode in episodes))

    return list(asyncio.run(main()))


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("It is right.\nScore: 8", 0.8),
        ("**Score: 7.5**", 0.75),
        ("Score: 8/10", 0.8),
        ("I give it 8 / 10.", 0.8),
        ("Score: 3? No.\nScore: 4", 0.4),
        ("The sum has 11 letters. 9", 0.9),
        ("10", 1.0),
        ("score = 0", 0.0),
    ],
)
def test_the_grade_is_read_from_how_models_write_it(text: str, total: float):
    with judge_server(reply(text)) as server:
        [score] = grade(judge_of(server.url), "5")
    assert score.total == pytest.approx(total)


def test_a_structured_reply_is_asked_for_and_read():
    with judge_server(reply("no JSON: 7"), reply('{"score": true}'), reply('{"reason": "so", "score": 3}')) as server:
        [score] = grade(judge_of(server.url, structured=True, low=1, high=5), "5")
        assert score.total == 0.5
        assert len(server.requests) == 3
        assert server.requests[0]["response_format"]["json_schema"]["strict"] is True


def test_the_judge_sees_question_truth_answer_and_the_variables_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    with judge_server(reply("1")) as server:
        grade(judge_of(server.url, api_key_env="MY_KEY"), "it is 5")
        [message] = server.requests[0]["messages"]
        assert server.keys == ["Bearer sesame"]
    for text in ("<question>\n2+3?\n", "<truth>\n5\n", "<answer>\nit is 5\n", "from 0 (worst) to 10 (best)"):
        assert text in message["content"]
    assert "sesame" not in repr(judge_of(server.url, api_key_env="MY_KEY"))


def test_a_rubric_of_its_own_is_filled_in(tmp_path: Path):
    rubric = tmp_path / "rubric.md"
    rubric.write_text("Q: {{ question }} A: {{ answer }} T: {{ truth.answer }}\n{{ transcript }}")
    with judge_server(reply("1")) as server:
        judge = judge_of(server.url, rubric=str(rubric))
        rubric.unlink()  # it travels with the judge
        grade(judge, "five {{ truth }}")
        assert server.requests[0]["messages"][0]["content"].startswith("Q: 2+3? A: five {{ truth }} T: 5\n")
        assert judge.files == (rubric,)
        with pytest.raises(ForgeError, match=r"cannot be filled in for task 't', whose truth has answer"):
            grade(judge_of(server.url, rubric="{{ truth.solution }}"), "5")


MISBEHAVIOUR = {
    "rate limit": raw(429, '{"error": {"message": "slow down"}}', Retry_After="0"),
    "broken server": raw(503, "<html>oops</html>"),
    "hangs up": hang_up,
    "drips for ever": drip,
    "no JSON": raw(200, "{"),
    "no completion": raw(200, '{"choices": null}'),
    "no choices": raw(200, '{"choices": []}'),
    "no object": raw(200, "[1]"),
    "no list of choices": raw(200, '{"choices": {"a": 1}}'),
    "nested too deeply": raw(200, "[" * 100_000),
    "an endless time to wait": raw(429, "{}", Retry_After="nan"),
    "a lone surrogate": raw(200, '{"choices": [{"message": {"content": "\\ud800"}}]}'),
    "no content": reply(""),
    "no grade": reply("I cannot say."),
    "a grade out of range": reply("Score: 11"),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_after_each_kind_of_misbehaviour_it_is_asked_again(name: str):
    with judge_server(MISBEHAVIOUR[name], reply("Score: 6")) as server:
        [score] = grade(judge_of(server.url, timeout_s=0.4 if name == "drips for ever" else 60.0), "5")
        assert score.total == 0.6
        assert len(server.requests) == 2 or name == "drips for ever"


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_what_goes_on_misbehaving_is_a_judge_error_that_says_how(name: str):
    with judge_server(MISBEHAVIOUR[name]) as server:
        with pytest.raises(JudgeError, match=r"judge m at http://127.*returned no grade: .*asked 2 times") as caught:
            grade(judge_of(server.url, timeout_s=0.4 if name == "drips for ever" else 60.0, retries=1), "5")
        assert len(server.requests) == 2
    assert not isinstance(caught.value, SpendingError)


def test_any_text_can_be_sent_read_and_kept(tmp_path: Path):
    content = '{"choices": [{"message": {"content": "\\ud800 Score: 4"}}], "usage": {"total_tokens": 1%s}}' % (
        "0" * 400
    )
    with judge_server(raw(200, content)) as server:
        for _ in range(2):  # the second time from the cache
            [score] = grade(judge_of(server.url, max_spent_tokens=10_000), "\ud800 five", folder=tmp_path)
            assert score.total == 0.4
        assert len(server.requests) == 1
    with judge_server(reply('{"reason": "", "score": %s}' % ("9" * 400)), reply('{"score": 7}')) as server:
        [score] = grade(judge_of(server.url, structured=True), "5")
        assert score.total == 0.7


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"retry-after": "3"}, 3),
        ({"retry-after": "-3"}, 0),
        ({"retry-after": "soon"}, 0),
        ({}, 0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT", "date": "Wed, 21 Oct 2015 07:28:00 GMT"}, 30),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT", "date": "Wed, 21 Oct 2015 07:28:30 GMT"}, 0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT", "date": "Wed, 21 Oct 2015 07:28:00"}, 0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT"}, 0),
        ({"retry-after": "Wed, 21 Oct 99999999999999999999 07:28:30 GMT", "date": "x"}, 0),
    ],
)
def test_the_endpoint_may_ask_for_a_wait_in_seconds_or_until_a_date(headers: dict[str, str], wait_s: float):
    assert _asked_wait_s(headers) == wait_s


@pytest.mark.parametrize(
    ("answer", "of_this_episode"),
    [(reply("fine"), True), (raw(400, "{}"), True), (raw(401, "{}"), False), (raw(503, "{}"), False)],
)
def test_a_failing_endpoint_is_told_from_an_answer_it_cannot_grade(answer: Any, of_this_episode: bool):
    with judge_server(answer) as server, pytest.raises(JudgeError) as caught:
        grade(judge_of(server.url, retries=0), "5")
    assert isinstance(caught.value, UngradedError) == of_this_episode


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (raw(401, '{"error": {"message": "bad key"}}'), "status 401: .*bad key"),
        (raw(404, '{"error": {"message": "no such model"}}'), "status 404"),
        (raw(429, '{"error": {"message": "pay", "code": "insufficient_quota"}}'), "status 429: .*pay"),
    ],
)
def test_what_asking_again_cannot_mend_fails_at_once(answer: Any, text: str):
    with judge_server(answer) as server:
        with pytest.raises(JudgeError, match=text):
            grade(judge_of(server.url), "5")
        assert len(server.requests) == 1


def test_an_endpoint_that_is_not_there_is_a_judge_error():
    with judge_server(reply("1")) as server:
        pass
    with pytest.raises(JudgeError, match="APIConnectionError"):
        grade(judge_of(server.url, retries=1), "5")


def test_equal_questions_are_asked_once_also_by_the_next_process(tmp_path: Path):
    with judge_server(reply("Score: 5"), delay_s=0.1) as server:
        judge = judge_of(server.url)
        scores = grade(judge, "5", "5", "6", folder=tmp_path / "reward")
        assert [score.parts["cached"] for score in scores] == [0.0, 1.0, 0.0]
        assert grade(judge, "5", folder=tmp_path / "reward")[0].parts["cached"] == 1.0
        assert len(server.requests) == 2
        # Everything that may change the grade makes another question.
        for other in ({"model": "n"}, {"temperature": 0.5}, {"high": 5.0}, {"rubric": "Be kind."}, {"max_tokens": 9}):
            [score] = grade(replace(judge, **other), "5", folder=tmp_path / "reward")
            assert score.parts["cached"] == 0.0, other
        assert len(server.requests) == 7
    assert (tmp_path / "reward").stat().st_mode & 0o077 == 0


def test_replies_can_be_shared_by_runs(tmp_path: Path):
    with judge_server(reply("Score: 5")) as server:
        judge = judge_of(server.url, cache=tmp_path / "shared", max_calls=1)
        for run in ("one", "two"):
            grade(judge, "5", folder=tmp_path / run)
        assert len(server.requests) == 1
        grade(judge, "6", folder=tmp_path / "two")  # the limit is each run's own


def test_requests_are_bounded_in_number_at_a_time():
    with judge_server(reply("Score: 5"), delay_s=0.05) as server:
        grade(judge_of(server.url, concurrent=2), *map(str, range(8)))
        assert (len(server.requests), server.most_at_once) == (8, 2)


@pytest.mark.parametrize(("limit", "calls"), [({"max_calls": 3}, 3), ({"max_spent_tokens": 50}, 2)])
def test_past_its_spending_limit_it_raises_also_after_a_restart(limit: dict[str, int], calls: int, tmp_path: Path):
    with judge_server(reply("Score: 5", tokens=30)) as server:
        judge = judge_of(server.url, concurrent=1, **limit)
        for number in range(calls):
            grade(judge, str(number), folder=tmp_path / "reward")
        for _ in range(2):
            with pytest.raises(SpendingError, match=rf"has used {calls} calls and {30 * calls} tokens in this run"):
                grade(judge, "more", folder=tmp_path / "reward")
        assert len(server.requests) == calls
        assert grade(judge, "0", folder=tmp_path / "reward")[0].total == 0.5  # kept replies are free
        grade(replace(judge, max_calls=10, max_spent_tokens=0), "more", folder=tmp_path / "reward")


def test_requests_that_fail_count_too(tmp_path: Path):
    with judge_server(raw(503, "{}")) as server:
        with pytest.raises(SpendingError, match="has used 2 calls"):
            grade(judge_of(server.url, max_calls=2), "5")
        assert len(server.requests) == 2


def test_a_key_is_never_shown():
    with pytest.raises(ConfigError) as caught:
        judge_of("http://x/v1", api_key_env="sk-12345")
    assert "12345" not in str(caught.value)


RUBRIC = [
    {"criterion": "Names the sum.", "weight": 3},
    {"criterion": "Shows {{ truth }} its steps.", "weight": 1},
    {"criterion": "Is rude.", "weight": -2},
]


def by_criteria(judge: Judge, rubric: object) -> Score:
    task = replace(TASK, truth={"rubric": rubric})
    return asyncio.run(judge(task, Episode(task=task, turns=(), output="5")))


def test_each_criterion_of_a_rubric_is_graded_and_pitfalls_subtract():
    with judge_server(reply("Score: 10"), reply("Score: 5"), reply("Score: 2")) as server:
        score = by_criteria(judge_of(server.url, criteria="rubric", concurrent=1), RUBRIC)
        asked = [request["messages"][0]["content"] for request in server.requests]
    # (3 * 1 + 1 * 0.5 - 2 * 0.2) / (3 + 1)
    assert score.total == pytest.approx(3.1 / 4)
    assert score.parts == pytest.approx(
        {"criterion_1": 1, "criterion_2": 0.5, "criterion_3": 0.2, "wanted": 3.5 / 4, "pitfalls": 0.2, "cached": 0}
    )
    assert "<criterion>\nShows {{ truth }} its steps.\n</criterion>" in asked[1]
    for text in ("<question>\n2+3?\n", "<answer>\n5\n", "from 0 (not met) to 10 (fully met)"):
        assert text in asked[0]


def test_a_rubric_without_pitfalls_has_no_part_for_them():
    with judge_server(reply("Score: 4")) as server:
        score = by_criteria(judge_of(server.url, criteria="rubric"), RUBRIC[:1] * 2)
        assert len(server.requests) == 1
    assert score.parts == pytest.approx({"criterion_1": 0.4, "criterion_2": 0.4, "wanted": 0.4, "cached": 0.5})


def test_nothing_but_pitfalls_that_apply_scores_below_zero():
    with judge_server(reply("Score: 0"), reply("Score: 10")) as server:
        assert by_criteria(judge_of(server.url, criteria="rubric", concurrent=1), RUBRIC[::2]).total == -2 / 3


def test_a_failed_criterion_fails_the_episode_unless_money_ran_out():
    with judge_server(reply("Score: 4"), raw(401, "{}")) as server:
        with pytest.raises(JudgeError, match="status 401") as caught:
            by_criteria(judge_of(server.url, criteria="rubric", concurrent=1), RUBRIC)
        assert not isinstance(caught.value, SpendingError)
    with judge_server(raw(401, "{}"), delay_s=0.3) as server, pytest.raises(SpendingError):
        by_criteria(judge_of(server.url, criteria="rubric", max_calls=1, concurrent=2), RUBRIC)


def test_a_template_is_filled_in_for_each_criterion():
    with judge_server(reply("1")) as server:
        by_criteria(judge_of(server.url, criteria="rubric", rubric="{{ criterion }} in {{ answer }}?"), RUBRIC[:1])
        assert server.requests[0]["messages"][0]["content"].startswith("Names the sum. in 5?\n")
    with pytest.raises(ConfigError, match="never shows the criterion"):
        judge_of(server.url, criteria="rubric", rubric="{{ answer }}?")
    with pytest.raises(ConfigError, match="unknown placeholders: criterion"):
        judge_of(server.url, rubric="{{ criterion }}")


def test_a_task_without_a_rubric_is_named():
    with pytest.raises(TaskError, match="the rubric of task 't' of 's', its truth's 'points', is missing"):
        by_criteria(judge_of("http://127.0.0.1:9/v1", criteria="points"), RUBRIC)
    with pytest.raises(TaskError, match="its truth's 'rubric', has 0 criteria"):
        by_criteria(judge_of("http://127.0.0.1:9/v1", criteria="rubric"), [])


def test_a_retry_never_comes_before_the_endpoints_retry_after(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judge_module.random, "uniform", lambda low, high: low)
    waits = list[float]()
    sleep = asyncio.sleep

    async def recorded(delay: float, *results: object) -> None:
        waits.append(delay)
        await sleep(0)

    monkeypatch.setattr(judge_module.asyncio, "sleep", recorded)
    with judge_server(raw(429, "{}", retry_after="7"), reply("Score: 5")) as server:
        grade(judge_of(server.url), "5")
    assert max(waits) == 7


async def test_a_locked_cache_holds_up_only_its_judge(tmp_path: Path):
    with judge_server(reply("Score: 5")) as server:
        judge = judge_of(server.url, cache=tmp_path)
        judge.load(None)
        with contextlib.closing(sqlite3.connect(tmp_path / "judge.sqlite", isolation_level=None)) as other:
            other.execute("begin exclusive")
            grading = asyncio.create_task(judge(TASK, Episode(task=TASK, turns=(), output="5")))
            # The loop goes on while the judge waits for the lock, which this test would otherwise never release.
            for _ in range(50):
                await asyncio.sleep(0)
            assert not grading.done()
            other.execute("rollback")
        assert (await grading).total == 0.5


async def test_what_was_paid_is_stored_though_the_score_is_given_up(tmp_path: Path):
    store = JudgeStore(tmp_path)
    assert await store.reserve("m", max_calls=0, max_tokens=0)
    with contextlib.closing(sqlite3.connect(tmp_path / "judge.sqlite", isolation_level=None)) as other:
        other.execute("begin exclusive")
        writes = [asyncio.create_task(write) for write in (store.add_tokens("m", 30), store.keep("key", "reply"))]
        await asyncio.sleep(0)
        for write in writes:
            write.cancel()
        await asyncio.wait(writes)
        other.execute("rollback")
    assert await store.spent("m") == (1, 30)
    assert await store.reply("key") == "reply"


def test_a_reply_that_cannot_be_stored_is_paid_once(tmp_path: Path):
    class Scorer:
        form: Form = "episode"

        async def score(self, episodes: Sequence[Episode]) -> Sequence[Score]:
            return [await judge(TASK, episode) for episode in episodes]

    with judge_server(reply("Score: 5")) as server:
        judge = judge_of(server.url, cache=tmp_path / "cache")
        judge.load(tmp_path / "run")
        assert judge._live is not None
        judge._live.replies._database.execute("pragma query_only = on")
        with pytest.raises(JudgeError, match="cannot use its stored replies: attempt to write a readonly database"):
            asyncio.run(score_again(Scorer(), [Episode(task=TASK, turns=(), output="5")]))
        assert len(server.requests) == 1
