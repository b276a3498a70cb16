"""A run's page: its data are bounded and checked, its texts stay text, and a browser shows what was recorded."""

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps import dashboard, report
from forge_rl.errors import ConfigError
from forge_rl.look.page import document
from forge_rl.look.page.episode_json import MOST_TOKENS, episode_json
from forge_rl.look.page.run_data import RunData
from forge_rl.look.page.trace_reader import read_trace
from forge_rl.metrics.episode_files import RecordedEpisode, write_episodes
from forge_rl.metrics.vocabulary import NAME, read_vocabulary, texts_of, write_vocabulary
from forge_rl.types import Episode, Score, Task, ToolCall
from tests.recorded_runs import recorded_run
from tests.test_recording import turn
from tools.browser import Browser, Tab, find_chromium
from tools.record_runs import record

ASSETS = Path(document.__file__).parent / "assets"
HOSTILE = (
    "</script><script>owned=1</script><img src=x onerror=owned=1> \x1b]0;owned\x07 \u202egnp.exe \x00 \ud800 "
    "<!--<script> ${owned=1} &lt;b&gt; \u2028"
)
OPENED = "document.documentElement?.dataset.opened"
needs_browser = pytest.mark.skipif(not find_chromium(), reason="there is no Chromium: apt-get install chromium")


def test_the_data_of_a_run_are_its_own(tmp_path: Path) -> None:
    run = RunData(recorded_run(tmp_path / "run", "tools", steps=2, groups=2, size=2))
    data = run.data()
    assert (data["state"], data["step"], data["steps"], data["score_after"]) == ("finished", 2, 2, 0.61)
    assert data["metrics"]["steps"] == [1, 2]
    episodes = data["episodes"]
    assert episodes["files"] == [[1, "evaluated", 4], [1, "trained", 4], [2, "trained", 4]]
    tasks = [episodes["texts"]["task"][code] for code in episodes["columns"]["task"]]
    assert tasks == [*["products/0"] * 2, *["products/1"] * 2, *(f"products/{at // 2}" for at in range(4, 12))]
    assert [name for name, _, _ in data["trace"]["phases"]] == ["rollout", "train", "publish", "checkpoint"] * 2
    assert data["advisories"] == []
    assert [mark[:2] for mark in data["trace"]["marks"]] == [["generator/0", "fault"], ["generator/0", "recovery"]]
    episode = run.episode("2-trained-0")
    first, second, third = episode["turns"]
    assert first["calls"][0]["error"].startswith("error: ValueError")
    assert [len(first["tokens"]), second["shown"][0]] == [len(first["ids"]), "\n<|im_start|>tool"]
    assert "".join(third["tokens"]).startswith("The result is")
    with pytest.raises(ConfigError, match="has no episode"):
        run.episode("2-trained-4")
    with pytest.raises(ConfigError, match="is not a run folder"):
        RunData(tmp_path)


def test_files_that_did_not_change_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunData(recorded_run(tmp_path / "run", "one_turn", steps=2, groups=1, size=2))
    before = run.data()["episodes"]
    opened = list[Path]()
    monkeypatch.setattr(
        "forge_rl.look.page.run_data.EpisodeFile", lambda path: opened.append(path) or pytest.fail(f"{path} was read")
    )
    assert run.data()["episodes"] == before
    (path,) = (tmp_path / "run" / "episodes").glob("000002-trained.parquet")
    os.utime(path, (1, 1))
    with pytest.raises(pytest.fail.Exception):
        run.data()


def hostile_run(folder: Path) -> Path:
    """A run folder in which everything that a model, a user or another machine can write is hostile."""
    task = Task(
        id=HOSTILE, source=HOSTILE, messages=({"role": HOSTILE, "content": [HOSTILE]},), truth={HOSTILE: HOSTILE}
    )
    call = ToolCall(id=HOSTILE, name=HOSTILE, arguments=HOSTILE, error=HOSTILE)
    played = Episode(
        task=task,
        turns=(turn([1], [2, 3], messages=task.messages, calls=(call,), text=HOSTILE + "wide" * 100_000),),
        score=Score(total=0.0, parts={HOSTILE: 1.0}, answer=HOSTILE),
        output=HOSTILE,
        problem=HOSTILE,
    )
    recorded_run(folder, "one_turn", steps=1, groups=1, size=2, text=HOSTILE.replace("\ud800", ""))
    records = [RecordedEpisode(step=2, kind="trained", group=0, index=at, episode=played) for at in range(2)]
    write_episodes(folder / "episodes" / "000002-trained.parquet", records)
    (folder / "episodes" / "000003-trained.parquet").write_bytes(b"PAR1" + HOSTILE.encode("utf-8", "replace"))
    write_vocabulary(folder / "episodes", [b"", b"</script>", b"<script>owned=1</script>", b"\xff\xfe\x00"])
    odd = [
        {"step": 1, HOSTILE: 0.5, "reward/mean": 1e999, "loss": {"a": 1}, "entropy": "high"},
        {"step": 10**30, "loss": 10**400},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd) + "[" * 100_000 + "\n7\n")
    (folder / "events.jsonl").write_text(
        json.dumps({"time": 1e400, "level": HOSTILE, "text": HOSTILE}) + '\n{"time": 1}\n[]\n' + "[" * 100_000
    )
    (folder / "trace.json").write_text('[\n{"ph":"M","name":"thread_name","tid":{},"args":3},\n' + "[" * 100_000)
    summary = {"faults": [{"service": HOSTILE, "cause": [HOSTILE], "at_s": "x"}, 3], "best": [], "seconds": 1e999}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.json").write_text(json.dumps({"model": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}, "steps": {}}))
    return folder


def test_hostile_folders_give_bounded_data_and_name_damaged_files(tmp_path: Path) -> None:
    run = RunData(hostile_run(tmp_path / "run"))
    data = run.data()
    assert any("000003-trained.parquet cannot be read" in problem for problem in data["problems"])
    assert data["metrics"]["columns"][HOSTILE][0] == 0.5
    text = document.encoded([data, run.episode("2-trained-0")])
    assert not {"<", ">", "&"} & set(text)
    assert text.isascii()
    assert json.loads(text)[0]["model"] == HOSTILE
    assert len(text) < 1_500_000, "long texts are cut"
    assert "more letters" in run.episode("2-trained-0")["turns"][0]["text"]


def test_an_episode_of_many_tokens_is_cut_on_the_page() -> None:
    ids = list(range(MOST_TOKENS + 10))
    episode = Episode(task=Task(id="1", source="s", messages=()), turns=(turn(ids, ids), turn([1], [2])))
    found = episode_json("1-trained-0", RecordedEpisode(step=1, kind="trained", episode=episode), [])
    assert [len(each["tokens"]) for each in found["turns"]] == [MOST_TOKENS, 0]
    assert [each["count"] for each in found["turns"]] == [MOST_TOKENS + 10, 1]


def test_a_trace_of_another_program_has_no_phases(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": [{"ph": "X", "ts": "a", "dur": 1}]}')
    assert read_trace(tmp_path) == {"phases": [], "marks": []}


def test_the_vocabulary_gives_each_token_its_text(tmp_path: Path) -> None:
    pieces = [b"two", b"\xe6\x97", b"\xa5 a", b"\xff"]
    write_vocabulary(tmp_path, pieces)
    assert read_vocabulary(tmp_path) == pieces
    assert texts_of([0, 1, 2, 3, 4, -1, 1], pieces) == ["two", "", "日 a", "\ufffd", "[4]", "[-1]", "\ufffd"]
    (tmp_path / NAME).write_bytes(b"PAR1")
    assert read_vocabulary(tmp_path) == []


def test_only_the_pages_own_script_runs() -> None:
    page = document.opening() + document.closing()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "default-src 'none'" in page
    assert "unsafe" not in document.policy() + document.policy(live=True)
    for path in ASSETS.glob("*.js"):
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\s*\(|new Function", path.read_text()
        )
        assert not found, f"{path.name} parses text as HTML or code: {found}"


def test_vendored_files_are_those_that_their_readme_names() -> None:
    named = dict(re.findall(r"\| `(\S+)` \| `([0-9a-f]{64})` \|", (ASSETS / "vendor" / "README.md").read_text()))
    assert named.keys() == {path.name for path in (ASSETS / "vendor").iterdir()} - {"README.md", "uPlot-LICENSE"}
    for name, digest in named.items():
        assert hashlib.sha256((ASSETS / "vendor" / name).read_bytes()).hexdigest() == digest


def whole(page: Path) -> list[str]:
    return re.findall(r'id="episode/0/([^"]+)"', page.read_text())


def test_a_report_holds_the_extremes_of_each_step_whole_within_its_bounds(tmp_path: Path) -> None:
    run, page = recorded_run(tmp_path / "run", "one_turn", steps=3, groups=4, size=4), tmp_path / "page.html"
    said = report.write(report.Config(run=run, out=page))
    assert "80 episodes, 80 of them whole" in said
    report.write(report.Config(run=run, out=page, episodes=15))
    names = whole(page)
    assert {name.rpartition("-")[0] for name in names} == {
        "1-trained",
        "2-trained",
        "3-trained",
        "1-evaluated",
        "3-evaluated",
    }
    data = RunData(run)
    rewards = [data.episode(name)["reward"] for name in names if name.startswith("3-trained")]
    assert {0.0, 1.0} <= set(rewards), "the worst and the best"
    report.write(report.Config(run=run, out=page, most_mib=0.0))
    assert whole(page) == []
    with pytest.raises(ConfigError, match="cannot be written"):
        report.write(report.Config(run=run, out=tmp_path / "none" / "page.html"))
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        report.write(report.Config(run=run, out=page / "page.html"))
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".html"] == ["run"]


def test_the_command_works_in_any_folder(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", "one_turn", steps=1, groups=1, size=2)
    forge_rl = [Path(sys.executable).with_name("forge-rl"), "report"]
    done = subprocess.run([*forge_rl, run], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("wrote run.html: ")
    assert len(whole(tmp_path / "run.html")) == 4
    done = subprocess.run([*forge_rl, tmp_path / "none"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "is not a run folder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def opened(browser: Browser, page: Path, place: str = "", **size: int) -> Tab:
    tab = browser.open(f"{page.as_uri()}#{place}", **size)
    tab.wait_for(OPENED)
    return tab


def page_of(run: Path, other: Path | None = None) -> Path:
    page = run.with_suffix(".html")
    report.write(report.Config(run=run, compare=other, out=page))
    return page


def check_colour(tab: Tab, name: str, episode: dict[str, Any]) -> None:
    """Looks whether the first token has the colour of its logprob."""
    tab.value(f"location.hash = 'episode/0/{name}?view=tokens&colour=logprob'")
    tab.wait_for("document.querySelector('.token')")
    colour = tab.value("getComputedStyle(document.querySelector('.token')).backgroundColor")
    alpha = float(re.fullmatch(r"rgba\(235, 130, 20, ([\d.]+)\)", colour)[1])  # type: ignore[index]
    assert alpha == pytest.approx(0.8 * min(1, -episode["turns"][0]["logprobs"][0] / 3), abs=0.01)


TEXT_OF_TURN = "document.querySelector('#turn-{}')?.parentElement.innerText.split('turn {} of')[1] ?? ''"


@needs_browser
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "turns", "said"),
    [
        ("one_turn", 1, "which makes"),
        ("tools", 3, "The result is"),
        ("world", 3, "I go"),
        ("agent", 3, "It was"),
        ("failed", 3, "The result is"),
    ],
)
def test_a_run_of_each_kind_is_read_in_a_browser(
    browser: Browser, tmp_path: Path, kind: str, turns: int, said: str
) -> None:
    run = recorded_run(tmp_path / "run", kind, steps=2, groups=2, size=4)
    if kind == "failed":  # with the run's tools
        assert RunData(run).episode("2-failed-0")["problem"] == "the maze raised"
    name = next(
        name
        for name in RunData(run).sample()
        if name.startswith("2-trained") and len((episode := RunData(run).episode(name))["turns"]) == turns
    )
    episode = RunData(run).episode(name)
    tab = opened(browser, page_of(run), f"episode/0/{name}")
    text = tab.value(TEXT_OF_TURN.format(turns, turns))
    assert said in text
    if kind == "tools":
        assert "error: ValueError" in tab.value("document.querySelector('.call.failed').innerText")
    if kind == "agent":
        assert "segment 2 of 2, helper" in tab.value("document.querySelector('#turn-2').innerText")
    check_colour(tab, name, episode)
    tab.move_to("document.querySelector('.token')")
    tab.wait_for("document.querySelector('.inspector').innerText.includes('probability')")
    if (entropies := episode["turns"][0]["entropies"]) is not None:
        assert "entropy" in tab.value("document.querySelector('.inspector').innerText")
        tab.value(f"location.hash = 'episode/0/{name}?view=tokens&colour=entropy'")
        colour = "getComputedStyle(document.querySelector('.token')).backgroundColor"
        tab.wait_for(f"{colour}.startsWith('rgba(150, 70, 200')")
        alpha = float(tab.value(colour).rstrip(")").split(",")[-1])
        assert alpha == pytest.approx(0.8 * min(1, entropies[0] / 3), abs=0.01)
    tab.value("location.hash = 'timeline/0/'")
    tab.wait_for("document.querySelector('.length')")
    margins = tab.value("[...document.querySelectorAll('.length')].map((bar) => parseFloat(bar.style.marginLeft))")
    assert min(margins) == 0 < max(margins) < 100, "bars begin where their episodes did"
    keys = "[...document.querySelectorAll('.legend .key')].map((key) => [key.innerText, key.style.cssText])"
    colours = {tuple(each) for each in tab.value(keys)}
    names = [name for name, _ in colours]
    assert sorted(names) == ["between phases", "checkpoint", "publish", "rollout", "train"], "of one colour each"
    tab.value("location.hash = 'faults/0/'")
    tab.wait_for("document.querySelector('main.faults')")
    texts = tab.value("document.body.innerText")
    assert "killed by SIGKILL" in texts
    assert "ended by KeyError: 'answer'" in texts
    assert "mine.py" not in texts, "a stack trace opens on demand"
    tab.value("document.querySelector('.event details').open = true")
    assert "mine.py" in tab.value("document.body.innerText")
    assert tab.problems == []


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the bundled model, of which the documentation's pictures are."""
    return record(tmp_path_factory.mktemp("real") / "folder", ("sums", "guess", "agent", "mixed", "failed"), steps=1)


@pytest.mark.nightly
@needs_browser
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "turns", "state", "shown"),
    [
        ("sums", 1, "finished", "right"),
        ("mixed", 2, "finished", "calculator"),
        ("guess", 3, "finished", "Guess again."),
        ("agent", 3, "finished", "segment 2 of 2, checker"),
        ("failed", 3, "failed", "A colleague says"),
    ],
)
def test_a_real_run_of_each_kind_is_read_in_a_browser(
    browser: Browser, real_runs: Path, name: str, turns: int, state: str, shown: str
) -> None:
    run = RunData(real_runs / name)
    episodes = [run.episode(each) for each in run.sample() if "-trained-" in each]
    episode = next(
        each
        for each in episodes
        if len(each["turns"]) >= turns and (name != "mixed" or any(turn["calls"] for turn in each["turns"]))
    )
    tab = opened(browser, page_of(real_runs / name), f"episode/0/{episode['name']}")
    assert tab.value("document.querySelector('.state').innerText") == state
    assert shown in tab.value("document.body.innerText")
    said = episode["turns"][turns - 1]["text"].strip()
    assert said
    assert "".join(said.split()) in "".join(tab.value(TEXT_OF_TURN.format(turns, turns)).split())
    check_colour(tab, episode["name"], episode)
    tab.value("location.hash = 'faults/0/'")
    tab.wait_for("document.querySelector('main.faults')")
    faults = tab.value("document.body.innerText")
    for cause in ("killed by SIGKILL", "FileNotFoundError") if state == "failed" else ():
        assert cause in faults
    assert tab.problems == []


@needs_browser
@pytest.mark.processes
def test_hostile_texts_stay_text_in_every_view(browser: Browser, tmp_path: Path) -> None:
    tab = opened(browser, page_of(hostile_run(tmp_path / "run")), "episode/0/2-trained-0")
    assert "</script><script>owned=1</script>" in tab.value("document.querySelector('.message.assistant').innerText")
    texts = tab.value("document.body.innerText")
    assert not {"\x1b", "\x07", "\u202e", "\x00"} & set(texts)
    assert "\\u202egnp.exe" in texts
    views = ("curves", "episodes", "episode", "groups", "timeline", "tasks", "faults", "settings")
    for place in [*(f"{view}/0/" for view in views), "episode/0/2-trained-1?view=tokens", "episode/0/%ff", "%/%/%?%"]:
        tab.value(f"location.hash = {place!r}")
        tab.wait_for("document.querySelector('main')")
        tab.value("new Promise((done) => setTimeout(done, 100))")
        assert tab.value("document.querySelectorAll('img, iframe, object, embed, body script:not([type])').length") == 1
        assert tab.value("'owned' in window") is False
        assert "This view failed" not in tab.value("document.body.innerText"), place
    assert tab.problems == []


@needs_browser
@pytest.mark.processes
def test_the_page_is_used_by_keys_and_fits_a_phone(browser: Browser, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "a", "mixed", steps=3)
    other = recorded_run(tmp_path / "b", "mixed", steps=3, settings={"trainer": {"optimizer": {"lr": 0.1}}})
    page = page_of(run, other)
    rows = [{"step": step, "episodes/truncated": 0.9} for step in range(1, 4)]
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.write(report.Config(run=run, compare=other, out=page))
    tab = opened(browser, page)
    said = tab.value("document.querySelector('.advisory.held').innerText")
    assert said == "B since step 190% of the episodes are truncated: raise --generator.max-tokens"
    tab.value("location.hash = 'episodes/0/'")
    tab.wait_for("document.querySelector('.row.chosen')")
    first = tab.value("document.querySelector('.row.chosen').innerText.split('\\n')[0]")
    tab.press("j")
    second = tab.value("document.querySelector('.row.chosen').innerText.split('\\n')[0]")
    assert (first, second) == ("3-trained-0", "3-trained-1")
    tab.press("Enter")
    tab.wait_for("document.querySelector('main.episode h2')?.innerText === '3-trained-1'")
    tab.press("ArrowRight")
    tab.wait_for("document.querySelector('main.episode h2')?.innerText === '3-trained-2'")
    tab.press("t")
    tab.wait_for("document.querySelector('.token')")
    tab.press("2")
    tab.wait_for("document.querySelector('main.episodes .find')")
    tab.press("/")
    assert tab.value("document.activeElement.className") == "find"
    tab.value("(document.activeElement.value = 'maze/', document.activeElement.dispatchEvent(new Event('input')))")
    tasks = "[...document.querySelectorAll('.inner .c2 span')].map((each) => each.title.split('/')[0])"
    tab.wait_for(f"(found => found.length && found.every((task) => task === 'maze'))({tasks})")
    tab.value("location.hash = 'compare/0/'")
    tab.wait_for("document.querySelectorAll('.side .message').length > 1")
    assert (
        tab.value("document.querySelector('.verdict').innerText")
        == "A and B differ in --trainer.optimizer.lr none -> 0.1"
    )
    assert tab.problems == []
    phone = opened(browser, page, "curves/0/", width=390, height=844)
    for view in ("curves", "episodes", "episode", "groups", "timeline", "tasks", "faults", "compare", "settings"):
        phone.value(f"location.hash = '{view}/0/'")
        phone.wait_for(f"document.querySelector('main.{view}')")
        phone.value("new Promise((done) => setTimeout(done, 50))")
        assert phone.value("document.documentElement.scrollWidth") == 390, view
    assert phone.problems == []


@contextlib.asynccontextmanager
async def served(run: Path) -> AsyncIterator[tuple[dashboard.Dashboard, str, str]]:
    """A dashboard, its address without the key, and the key."""
    serving = dashboard.Dashboard(dashboard.Config(run=run, port=0))
    try:
        address, _, key = serving.url.partition("/#key=")
        yield serving, address, key
    finally:
        await serving.stop()


def answer(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as found:
            return found.status, found.read(), {name.lower(): value for name, value in found.headers.items()}
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), {name.lower(): value for name, value in error.headers.items()}


async def test_the_dashboard_gives_data_for_its_key_alone(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", "one_turn", steps=1, groups=1, size=2)

    async with served(run) as (_, address, key):

        async def get(path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
            return await asyncio.to_thread(answer, address + path, **headers)

        bearer = {"Authorization": f"Bearer {key}"}
        status, page, headers = await get("/")
        assert status == 200
        assert b"sums" not in page
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
        assert (headers["cache-control"], headers["x-frame-options"]) == ("no-store", "DENY")
        for path in ("/data.json", "/episode/0/1-trained-0.json"):
            assert (await get(path))[0] == 401
            assert (await get(path, Authorization="Bearer wrong"))[0] == 401
            assert (await get(path, Host="evil.example", **bearer))[0] == 403
            assert (await get(path, Origin="https://evil.example", **bearer))[0] == 403
            assert (await get(path, **bearer))[0] == 200
        tag = (await get("/data.json", **bearer))[2]["etag"]
        assert (await get("/data.json", **bearer, **{"If-None-Match": tag}))[0] == 304
        for path in ("/episode/0/1-trained-9.json", "/episode/7/1-trained-0.json", "/episode/0/..%2f..%2fx.json"):
            assert (await get(path, **bearer))[0] == 404


@needs_browser
@pytest.mark.processes
def test_the_dashboard_shows_the_steps_of_a_live_run(browser: Browser, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", "one_turn", steps=1, groups=1, size=2)
    (run / "summary.json").unlink()

    def look(url: str) -> None:
        tab = browser.open(url)
        tab.wait_for(f"{OPENED} && document.querySelector('.about')?.innerText.startsWith('step 1 of')")
        assert "key=" not in tab.value("location.href")
        tab.value("location.hash = 'episodes/0/'")
        tab.wait_for("document.querySelector('.row.chosen')?.innerText.includes('1-trained-0')")
        row = json.loads((run / "metrics.jsonl").read_text())
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**row, "step": 2}) + "\n")
        episode = Episode(task=Task(id="t", source="new", messages=()), turns=(turn([1], [2]),), score=Score(total=0.5))
        record = RecordedEpisode(step=2, kind="trained", group=0, episode=episode, advantages=np.ones(1, np.float32))
        write_episodes(run / "episodes" / "000002-trained.parquet", [record])
        tab.wait_for("document.querySelector('.about').innerText.startsWith('step 2 of')")
        tab.wait_for("document.querySelector('.inner .row').innerText.includes('2-trained-0')")
        tab.value("location.hash = 'episode/0/2-trained-0'")
        tab.wait_for("document.querySelector('.message.assistant')?.innerText.includes('answer')")
        assert tab.problems == []

    async def serve() -> None:
        async with served(run) as (serving, _, _):
            await asyncio.to_thread(look, serving.url)

    asyncio.run(serve())
