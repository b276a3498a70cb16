"""Bundled worlds: search over a corpus, games with their tasks, and a user whom another model plays."""

import asyncio
import contextlib
import http.server
import json
import pickle
import sqlite3
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_rl.data.mixture import Mixture
from forge_rl.data.sources import Source
from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.protocol import EnvFactory, Step
from forge_rl.envs.search import Corpus
from forge_rl.errors import ConfigError, ForgeError, TaskError
from forge_rl.types import Message, Task
from forge_rl.worlds.game import GuessNumber
from forge_rl.worlds.user import SimulatedUser


async def play(factory: EnvFactory, task: Task, answers: Sequence[str], **told: Any) -> list[Step]:
    """Steps of an episode whose model writes these answers, until it is done."""
    env = factory(task)
    await env.reset()
    steps: list[Step] = []
    for answer in answers:
        steps.append(await env.step(answer, **told))
        if steps[-1].done:
            break
    return steps


def said(step: Step) -> str:
    return " ".join(str(message["content"]) for message in step.messages)


# Search


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    rows = [
        {"title": "France", "text": "The capital of France is Paris. " + "It has rivers. " * 200},
        {"title": "Germany", "text": "Berlin is its capital, and \N{LATIN SMALL LETTER U WITH DIAERESIS}ber all."},
        {"text": "Oslo lies in Norway \ud800."},
    ]
    (tmp_path / "notes.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return tmp_path / "notes.jsonl"


@pytest.mark.parametrize(
    ("query", "titles"),
    [
        ("capital", ["Germany", "France"]),
        ("What is the capital of Germany?", ["Germany", "France"]),
        ("norway", ["3"]),
        ("UBER", ["Germany"]),
        ('" NEAR ( * ^', []),
        ("", []),
        ("xyzzy", []),
    ],
)
def test_a_search_finds_texts_with_any_of_its_words_the_nearest_first(query: str, titles: list[str], notes: Path):
    corpus = Corpus.open(notes, notes.parent / "cache")
    assert [title for title, _ in corpus.search(query)] == titles


def test_a_search_shows_the_matching_parts_of_few_texts(notes: Path):
    search = pickle.loads(pickle.dumps(Corpus.open(notes, notes.parent / "cache").tool(results=1)))
    found = search("rivers France")
    assert found.startswith("[France] ")
    assert len(found) <= 600
    assert search("capital Germany").startswith("[Germany] Berlin is its capital")
    assert "France" not in search("capital Germany")
    assert search("xyzzy") == "nothing was found"


def test_an_index_is_built_once_until_a_text_changes(notes: Path):
    cache = notes.parent / "cache"
    first = Corpus.open(notes, cache)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    inode = first.index.stat().st_ino
    assert Corpus.open(notes, cache) == first
    assert first.index.stat().st_ino == inode
    assert list(cache.iterdir()) == [first.index]
    notes.write_text(json.dumps({"text": "Rome"}) + "\n")
    second = Corpus.open(notes, cache)
    assert second != first
    assert [text for _, text in second.search("rome")] == ["Rome"]
    assert Corpus.open(second.index, cache).search("rome") == second.search("rome")


def test_a_folder_of_texts_is_a_corpus_and_other_files_in_it_are_not(tmp_path: Path):
    texts = tmp_path / "texts"
    (texts / "deep").mkdir(parents=True)
    (texts / "deep" / "a.md").write_text("a whale")
    (texts / "b.txt").write_bytes(b"a whale \xff")
    (texts / "c.bin").write_text("a whale")
    found = Corpus.open(texts, tmp_path / "cache").search("whale")
    assert sorted(title for title, _ in found) == ["b.txt", "deep/a.md"]


def test_an_open_cache_is_refused_and_a_broken_row_leaves_no_index(notes: Path):
    cache = notes.parent / "cache"
    for broken_row in ("[1]", "[" * 100_000):
        notes.write_text(f'{{"text": "a"}}\n{broken_row}\n')
        with pytest.raises(ConfigError, match=r"notes.jsonl:2 has no text"):
            Corpus.open(notes, cache)
        assert list(cache.iterdir()) == []
    (cache / "planted").write_text("")
    (cache / "planted").chmod(0o666)
    cache.chmod(0o777)
    with pytest.raises(ConfigError, match="cannot be trusted"):
        Corpus.open(notes, cache)


def test_a_database_of_another_shape_is_refused(tmp_path: Path):
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as database:
        database.execute("CREATE TABLE texts (title, text)")
    with pytest.raises(ConfigError, match="cannot be searched"):
        Corpus.open(tmp_path / "other.db", tmp_path / "cache")


# A game


def game_task(number: int, **options: int) -> tuple[GuessNumber, Task]:
    game = GuessNumber(**options)
    return game, game._task(number)


@pytest.mark.parametrize(
    ("answers", "replies", "rewards", "won"),
    [
        (["10", "15", "my guess is 12!"], ["Higher.", "Lower.", ""], [0.1, 0.1, 1.0], 1.0),
        (["10", "5", "12"], ["Higher.", "Higher.", ""], [0.1, 0.0, 1.0], 1.0),  # 5 was ruled out
        (["?", "99", "x"], ["Write a number from 1 to 20.", "Lower.", ""], [0.0, 0.0, 0.0], 0.0),
        (["11", "13", "14"], ["Higher.", "Lower.", ""], [0.1, 0.1, 0.0], 0.0),
        (["10" * 9 + "12", "9" * 5000, "12"], ["Lower.", "Lower.", ""], [0.0, 0.0, 1.0], 1.0),  # not 12 at its end
    ],
)
async def test_a_game_credits_each_guess_that_is_still_possible(answers, replies, rewards, won):
    game, task = game_task(12, max_turns=3)
    steps = await play(game, task, answers)
    assert [said(step) for step in steps] == replies
    assert [step.reward for step in steps] == rewards
    assert steps[-1].parts == {"won": won}


def test_a_games_tasks_are_resumable_and_hold_some_out():
    def source(seed: int = 0, highest: int = 50) -> Source:
        return sources_of(GuessNumber(highest=highest), seed)["game"]

    def numbers(tasks: Sequence[Task]) -> list[object]:
        return [task.truth["number"] for task in tasks]

    one = source()
    drawn = numbers([one.draw() for _ in range(200)])
    held_out = numbers(one.held_out(100))
    assert set(drawn) | set(held_out) == set(range(1, 51))
    assert not set(drawn) & set(held_out)
    assert 5 <= len(held_out) <= 20
    assert numbers(source(seed=1).held_out(100)) == held_out
    assert numbers([source(seed=1).draw() for _ in range(20)]) != drawn[:20]
    state = json.loads(json.dumps(one.state()))
    rest = numbers([one.draw() for _ in range(5)])
    other = source()
    other.restore(state)
    assert numbers([other.draw() for _ in range(5)]) == rest
    with pytest.raises(TaskError, match="and the seed 1"):
        source(seed=1).restore(state)
    tiny = source(highest=2)
    assert {*numbers([tiny.draw()]), *numbers(tiny.held_out(5))} == {1, 2}
    assert tiny.draw().truth["answer"] in ("1", "2")
    assert source(highest=10**12).draw().source == "game"
    assert Mixture({"game": one}).draw_from("game").source == "game"


# textarena


def test_a_game_of_textarena_is_played_to_its_end():
    pytest.importorskip("textarena")
    arena = pickle.loads(pickle.dumps(build_environment("textarena:GuessTheNumber-v0")))
    task = sources_of(arena, 0)["GuessTheNumber-v0"].draw()
    assert task.source == "GuessTheNumber-v0"

    async def main() -> list[Step]:
        env = arena(task)
        assert "between 1 and 20" in str((await env.reset()).messages[0]["content"])
        return [await env.step(f"[{guess}]") for guess in range(1, 3)]

    steps = asyncio.run(main())
    assert all(step.done or "number is higher" in said(step) for step in steps)
    won = asyncio.run(play(arena, task, [f"[{guess}]" for guess in range(1, 21)]))[-1]
    assert won.done
    assert won.reward is not None

    async def invalid() -> Step:
        env = arena(task)
        await env.reset()

        def step(completion: str) -> None:
            raise ValueError(f"no move: {completion}")

        env._game.step = step
        return await env.step("?")

    refused = asyncio.run(invalid())
    assert (refused.done, said(refused)) == (False, "error: no move: ?")
    with pytest.raises(ConfigError, match="cannot make 'Nothing-v0'"):
        build_environment("textarena:Nothing-v0")


def test_games_that_start_at_once_leave_stderr_as_it_was(monkeypatch: pytest.MonkeyPatch):
    barrier, first_done = threading.Barrier(2), threading.Event()

    class Game:
        def reset(self, num_players: int, seed: int) -> None:
            if seed:
                barrier.wait(60)
            if seed == 2:
                assert first_done.wait(60)

        def get_observation(self) -> tuple[int, list[tuple[int, str]]]:
            return 0, [(-1, "Guess.")]

    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=lambda name: Game()))
    arena = build_environment("textarena:Stand-in-v0")
    stderr = sys.stderr

    async def main() -> None:
        first, second = (
            asyncio.ensure_future(arena(Task(id="1", source="s", messages=(), truth={"seed": seed})).reset())
            for seed in (1, 2)
        )
        await first
        first_done.set()
        await second

    asyncio.run(main())
    assert sys.stderr is stderr
    with pytest.raises(ConfigError, match="--env textarena:max_turns is 0"):
        build_environment("textarena:Stand-in-v0,max_turns=0")


# A simulated user

Reply = Callable[[dict[str, Any]], tuple[int, object]]


@contextlib.contextmanager
def endpoint(reply: Reply) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve an OpenAI-compatible endpoint; yield its address, and the requests that come."""
    seen: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({**request, "key": self.headers["Authorization"]})
            status, content = reply(request)
            message = {"role": "assistant", "content": content}
            choice = {"index": 0, "message": message, "finish_reason": "stop" if content else "length"}
            body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", seen
        finally:
            server.shutdown()


TABLE: tuple[Message, ...] = (
    {"role": "system", "content": "You book tables."},
    {"role": "user", "content": "Hi, a table please."},
)
BOOKING = Task(id="1", source="s", messages=TABLE, truth={"goal": "A table for two."})


async def test_a_user_talks_with_the_policy_until_it_has_what_it_wants():
    lines = iter(["For two.", "Thanks. DONE"])
    with endpoint(lambda request: (200, next(lines))) as (url, seen):
        user = build_environment(f"user:model=m,base_url={url},api_key_env=,temperature=0.5")
        user = pickle.loads(pickle.dumps(user))
        first, last = await play(user, BOOKING, ["How many?", "Booked."], truncated=False)
    assert first == Step(done=False, messages=({"role": "user", "content": "For two."},))
    assert last == Step(done=True)
    assert [(message["role"], message["content"]) for message in seen[1]["messages"][1:]] == [
        ("assistant", "Hi, a table please."),
        ("user", "How many?"),
        ("assistant", "For two."),
        ("user", "Booked."),
    ]
    assert "You want this:\nA table for two.\n" in seen[0]["messages"][0]["content"]
    assert (seen[0]["model"], seen[0]["temperature"], seen[0]["key"]) == ("m", 0.5, "Bearer none")


def test_a_conversation_ends_after_its_turns_and_when_an_answer_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_KEY", "secret-key")
    with endpoint(lambda request: (200, "go on")) as (url, seen):
        user = SimulatedUser(model="m", base_url=url, api_key_env="A_KEY", max_turns=3)
        assert b"secret-key" not in pickle.dumps(user)
        steps = asyncio.run(play(user, BOOKING, ["a"] * 9, truncated=False))
        assert [step.done for step in steps] == [False, False, True]
        assert len(seen) == 2
        assert asyncio.run(play(user, BOOKING, ["a"], truncated=True)) == [Step(done=True)]
        assert len(seen) == 2
    assert seen[0]["key"] == "Bearer secret-key"


def test_lone_surrogates_of_a_goal_and_a_reply_are_not_sent():
    task = replace(BOOKING, truth={"goal": "a \ud800 table"})
    with endpoint(lambda request: (200, "go \udfff on")) as (url, seen):
        user = SimulatedUser(model="m", base_url=url, api_key_env="")
        steps = asyncio.run(play(user, task, ["a"] * 2, truncated=False))
    assert [said(step) for step in steps] == ["go ? on"] * 2
    assert "a ? table" in str(seen[0])


def test_an_endpoint_that_fails_is_an_error_of_the_environment():
    with endpoint(lambda request: (500, "no")) as (url, seen):
        user = SimulatedUser(model="m", base_url=url, api_key_env="", retries=1)
        with pytest.raises(ForgeError, match="the simulated user m failed: Error code: 500"):
            asyncio.run(play(user, BOOKING, ["a"], truncated=False))
        assert len(seen) == 2
    with endpoint(lambda request: (200, "")) as (url, _):
        user = SimulatedUser(model="m", base_url=url, api_key_env="", max_tokens=7)
        with pytest.raises(ForgeError, match="the simulated user m wrote no message within 7 tokens"):
            asyncio.run(play(user, BOOKING, ["a"], truncated=False))
    closed = threading.Event()

    def slow(request: dict[str, Any]) -> tuple[int, object]:
        closed.wait()
        return 200, "late"

    with endpoint(slow) as (url, _):
        user = SimulatedUser(model="m", base_url=url, api_key_env="", retries=0, timeout_s=0.2)
        with pytest.raises(ForgeError, match=r"no reply within 0.2 s"):
            asyncio.run(play(user, BOOKING, ["a"], truncated=False))
        closed.set()
