"""README and docs: tutorials run as they stand, on a tiny model; quotes, links and figures are what they name."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.demo import DEMO
from benchmarks.gpu.machine import describe
from benchmarks.report import Report
from forge_rl.algorithms.correction import Correction
from forge_rl.algorithms.user_loss import try_loss
from forge_rl.cli import commands as programs
from forge_rl.criteria import read_criteria
from forge_rl.data.sources import Columns
from forge_rl.envs.env_flag import build_environment
from forge_rl.errors import TaskError
from forge_rl.flags.command_line import parse
from forge_rl.rewards.reward_flag import REWARDS, build_reward
from forge_rl.sandbox.inside.server import missing_layers
from forge_rl.sandbox.shared import default_profile
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Task
from recipes.grpo import Config
from tests.code_tricks import CALLED, PRINTED
from tests.commands import Command, metrics
from tests.harbor_tasks import TASKS, TRICKS
from tests.recorded_runs import recorded_run
from tests.security.test_hostile_images import IMAGES, LAYERS
from tools.figures import FOLDER, filled, pages, parts, rows, table
from tools.record_runs import TUTORIAL, tutorial

ROOT = Path(__file__).parent.parent
TOPS = ("forge_rl", "recipes", "benchmarks", "tests", "tools", "requirements")
README = (ROOT / "README.md").read_text()
METRICS = (ROOT / "docs" / "running" / "metrics.md").read_text()
ROOMS = [ROOT / "CONTRIBUTING.md", *(path for top in TOPS for path in sorted((ROOT / top).rglob("README.md")))]
PAGES = [ROOT / "README.md", *ROOMS, *sorted((ROOT / "docs").rglob("*.md"))]
DOORS = "\n".join(
    (ROOT / "docs" / "doors" / f"{name}.md").read_text()
    for name in ["distillation", "data", "reward", "tools", "world", "agent"]
)
FENCES = re.findall(r"```(\w+)\n(.*?)```", DOORS, flags=re.DOTALL)
FILES = {found[1]: text for kind, text in FENCES if kind == "python" and (found := re.match(r"# (\S+)\n", text))}
COMMANDS = [line for kind, text in FENCES if kind == "sh" for line in text.splitlines()]
ROWS = [{"problem": f"What is {n} + {m}?", "solution": str(n + m)} for n in range(1, 7) for m in range(1, 7)]

SMALL = (
    *("--steps", "1", "--groups-per-batch", "2", "--group-size", "2", "--evaluation.tasks", "0", "--display", "plain"),
    *("--generator.max-model-len", "512", "--generator.max-tokens", "8", "--generator.kv-cache-gib", "0.25"),
    *("--checkpoint-every", "0"),
)


def test_the_tutorials_have_a_command_for_each_way_in() -> None:
    assert set(FILES) == {"mine.py", "safe.py", "shop.py", "world.py", "agent.py"}
    assert len(COMMANDS) == 10


def test_the_commands_of_the_first_tasks_are_read_as_they_stand(tmp_path: Path, monkeypatch) -> None:
    files, commands = tutorial()
    monkeypatch.chdir(tmp_path)
    for name, body in files.items():
        (tmp_path / name).write_text(body)
    subprocess.run([sys.executable, "make.py"], check=True)
    for name in ("sums", "wrong"):
        recorded_run(tmp_path / "runs" / name, "one_turn", steps=1, groups=1, size=2)
    lines = [each.text for each in commands if each.text.startswith("forge-rl")]
    assert len(lines) == 13
    for line in lines:
        _, name, *args = shlex.split(line)
        module = importlib.import_module(programs()[name].removeprefix("forge_rl."))
        parse(module.Config, name, args)
    drawn = [each.picture for each in commands if each.picture]
    assert {path.stem for path in (ROOT / "docs" / "pictures" / "tasks").iterdir()} == set(drawn)
    assert all("](../pictures/" in section for section in TUTORIAL.read_text().split("\n## ")[1:])
    assert build_reward(("mine.py:score",)) is not None
    assert build_environment("guess.py:Guess") is not None
    assert build_environment("shop.py:TOOLS,max_turns=4") is not None


def undocumented(names: Iterable[str]) -> list[str]:
    """Names of metrics that the page of metrics lacks."""
    cells = [line.split(" | ")[0] for line in METRICS.splitlines() if line.startswith("| `")]
    known = re.findall(r"`([^` ]+)`", "\n".join(cells))
    known += [f"tokens/completion{ending}" for ending in known if ending.startswith("_")]
    known += [f"{name}/SOURCE" for name in ("entropy", "ratio/NAME", "kl_NAME/NAME", "teacher/kl")]
    pattern = re.compile(rf"(critic/)?({'|'.join(re.sub('[A-Z]+', '.+', name) for name in known)})")
    return [name for name in names if not pattern.fullmatch(name)]


def test_the_page_of_metrics_has_those_of_a_run(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run", "mixed")
    names = {name for row in metrics(tmp_path / "run") for name in row} - {"step"}
    assert len(names) > 20
    assert undocumented(names) == []
    assert undocumented(["reward/mean", "nonsense/mean", "lag"]) == ["nonsense/mean", "lag"]


@pytest.mark.nightly
@pytest.mark.parametrize("line", COMMANDS, ids=[line.split("-m ")[1][:60] for line in COMMANDS])
def test_each_command_runs(
    line: str, commands: list[Command], tiny_model: Path, tmp_path: Path, nothing_left: None, monkeypatch
):
    if "--env python" in line and (missing := missing_layers(default_profile())):
        pytest.skip(f"sandbox sessions cannot be isolated here: {missing}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = shlex.split(line.replace('"python ', f'"{sys.executable} '))
    assert words[:2] == ["python", "-m"]
    small = (*SMALL, "--out", str(tmp_path / "run")) if "recipes." in line else ()
    command = Command(*words[2:], "--model", str(tiny_model), *small, cwd=tmp_path)
    commands.append(command)
    assert command.end(400) == 0, command.output
    if small:
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["steps"] == 1
        (row,) = metrics(tmp_path / "run")
        assert row["outcomes/completed"] + row["outcomes/truncated"] >= 4
        assert undocumented(row.keys() - {"step"}) == []


def test_the_benchmark_of_the_demo_runs_the_demo() -> None:
    assert f"-m {' '.join(DEMO)} $(ARGS)" in (ROOT / "Makefile").read_text()


def test_the_readme_fits_its_page_and_quotes_the_recipe() -> None:
    assert len(README.splitlines()) <= 160
    quoted = next(
        text for text in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "async def step" in text
    )
    assert quoted.strip() in (ROOT / "recipes" / "grpo.py").read_text()


def test_the_page_of_agents_quotes_their_recipe() -> None:
    page = (ROOT / "docs" / "doors" / "agent.md").read_text()
    recipe = {line.strip() for line in (ROOT / "recipes" / "agent_openai.py").read_text().splitlines()}
    [quoted] = [text for text in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "rl.Session" in text]
    assert {line.strip() for line in quoted.splitlines()} <= recipe


def test_the_examples_function_on_its_page_ends_answers_as_the_template_does(tiny_model: Path) -> None:
    page = (ROOT / "docs" / "doors" / "examples.md").read_text()
    [code] = [text for text in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "def backwards" in text]
    names: dict[str, Any] = {}
    exec(code, names)
    tokenizer = Tokenizer(tiny_model)
    task = Task(id="sum/1", source="sum", messages=({"role": "user", "content": "2+30"},))
    [episode] = names["backwards"](task, tokenizer)
    [turn] = episode.turns
    assert turn.token_ids[-1] == tokenizer.turn_ends.trained
    assert tokenizer.decode(turn.token_ids) == "03+2"
    with pytest.raises(TaskError, match="accents"):
        names["backwards"](replace(task, messages=({"role": "user", "content": "é"},)), tokenizer)


def test_the_method_on_its_page_is_accepted() -> None:
    page = (ROOT / "docs" / "doors" / "methods.md").read_text()
    code = next(text for text in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "class Truncated" in text)
    names: dict[str, Any] = {"__name__": "method"}
    exec(code, names)
    try_loss(names["Truncated"](kl_coef=0.1, correction=Correction.presets["tis"]))


def test_the_rewards_on_their_page_are_accepted_and_all_are_listed() -> None:
    page = (ROOT / "docs" / "doors" / "reward.md").read_text()
    for line in re.findall(r"^--reward (.+)$", page, flags=re.MULTILINE):
        build_reward(shlex.split(line))
    for name in REWARDS:
        assert re.search(rf"^\|.*`{name}[`:]", page, flags=re.MULTILINE), name
    [row] = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    task, _ = Columns(rubric="rubric").read(json.loads(row), "sky")
    assert read_criteria(task.truth["rubric"])[1].weight == -1


def test_the_flags_of_the_curriculum_on_their_page_are_accepted() -> None:
    page = (ROOT / "docs" / "doors" / "data.md").read_text()
    configs = [
        parse(Config, "grpo", shlex.split(line))
        for line in re.findall(r"^python -m recipes.grpo (.*--(?:curriculum|schedule)\..*)$", page, flags=re.MULTILINE)
    ]
    assert [each.curriculum.pools for each in configs] == ["solve_rate", "solve_rate", "off"]
    assert configs[1].curriculum.part in build_reward(configs[1].rewards).parts
    assert configs[2].schedule.least_advantage == 0.2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def lost_files(page: Path) -> list[str]:
    """Files named in a page that are neither in its folder, in the repository's or the package's, nor in one of a path
    named before them in the line."""
    lost = []
    for line in page.read_text().splitlines():
        folders = [ROOT, ROOT / "forge_rl", page.parent]
        for name in re.findall(r"`([\w./-]+(?:\.(?:py|pyi|js|md|toml|yml|sh)|/))`", line):
            path = next((folder / name for folder in folders if (folder / name).exists()), None)
            if path is not None:
                folders += [folder for folder in (path, *path.parents) if folder.is_relative_to(ROOT)]
            elif not name.endswith("/"):  # which may be a folder of something else
                lost.append(name)
    return lost


def test_contributors_are_sent_to_files_that_exist(tmp_path: Path) -> None:
    pages = [*ROOMS, ROOT / "docs" / "architecture.md", ROOT / "docs" / "reference" / "walks.md"]
    assert {str(page.relative_to(ROOT)): lost for page in pages if (lost := lost_files(page))} == {}
    (tmp_path / "page.md").write_text("`run/run.py`, `target.py`, `run_dir.py`, `records/run_dir.py`\n`target.py`")
    assert lost_files(tmp_path / "page.md") == ["run_dir.py", "target.py"]


def test_every_room_says_what_it_is_and_contributing_leads_to_it() -> None:
    rooms = {path.parent for path in (ROOT / "forge_rl").glob("*/__init__.py")}
    assert rooms == {path.parent for path in ROOMS if path.parent.parent == ROOT / "forge_rl"}
    linked = re.findall(r"\]\(([^)#]+README.md)\)", (ROOT / "CONTRIBUTING.md").read_text())
    assert {ROOT / target for target in linked} >= {room / "README.md" for room in rooms}


def test_contributing_and_the_architecture_can_be_read_at_once() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().split()) <= 900
    assert len((ROOT / "docs" / "architecture.md").read_text().split()) <= 1500


def test_pages_say_how_many_attempts_tests_make() -> None:
    doors = ROOT / "docs" / "doors"
    assert f"`tests/code_tricks.py` has {len(CALLED) + len(PRINTED)} attempts" in (doors / "reward.md").read_text()
    images = f"`tests/security/test_hostile_images.py` has {len(LAYERS) + len(IMAGES)} such images"
    assert images in (doors / "images.md").read_text()
    assert (len(TASKS), len(TRICKS)) == (10, 8)
    counts = r"Ten tasks in this format are in `tests/harbor_tasks\.py`: .* eight tricks 0"
    assert re.search(counts, (doors / "world.md").read_text())


def test_figures_on_all_pages_are_what_their_files_say() -> None:
    assert [page for page in pages() if filled(page.read_text()) != page.read_text()] == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_of_figures_has_the_keys_of_a_report_and_its_page(path: Path) -> None:
    report = json.loads(path.read_text())
    if path.stem != "gpu":  # written by benchmarks.gpu, part by part
        assert report.keys() - {"note"} == Report("any").as_json().keys()
    assert any(f"<!-- measured: {path.stem} " in page.read_text() for page in pages())


def test_a_table_is_written_from_a_report() -> None:
    report = {
        "command": "python -m benchmarks.shuffle --steps 3",
        "date": "2026-11-23",
        "commit": "abc",
        "machine": {"cpu": "a processor", "cores": 2, "memory_gib": 24.0},
        "versions": {"torch": "2.13.0", "peer": {"trl": "1.2"}},
        "results": {"seconds": 2.5, "speedup": 1.5},
        "spreads": {"seconds": [1.0, 3.0, 3]},
    }
    text = table(report)
    assert "| seconds | 2.5 | 1 to 3 | 3 |" in text
    assert "| speedup | 1.5 |  |  |" in text
    assert "2026-11-23, commit `abc`, 2 cores of a processor, 24.0 GiB." in text


def test_parts_of_a_machine_are_rows() -> None:
    outcomes = [
        {"part": "copies", "status": "ok", "seconds": 7.2, "figures": {"gb_s": 54.57}},
        {"part": "engine", "status": "failed", "seconds": 3.0, "figures": {}},
    ]
    text = parts(describe() | {"command": "python -m benchmarks.gpu", "note": "Lent.", "parts": outcomes})
    assert "| copies | gb_s | 54.57 |\n| engine | failed | 3 |\n" in text
    assert "Lent." in text


def test_fields_of_rows_are_columns() -> None:
    report = {"rows": [{"name": "one", "loss": 1.26e-9, "other": 1}, {"name": "two"}]}
    assert rows(report, ["name", "loss"]) == "| name | loss |\n|---|---|\n| one | 1.3e-09 |\n| two |  |\n"


def test_cases_are_columns_and_values_stand_in_sentences(tmp_path: Path) -> None:
    results = {"busy_slow": 0.5, "busy_fast": 1.0, "busy_fast_64": 12345.0, "rate": 1.5}
    report = json.loads((FOLDER / "weights.json").read_text()) | {"results": results, "spreads": {}}
    (tmp_path / "race.json").write_text(json.dumps(report))
    page = "<!-- measured: race by slow fast -->\nold<!-- end --> It is <!-- value: race.rate -->?<!-- end --> times."
    text = filled(page, tmp_path)
    assert "| result | slow | fast |\n|---|---|---|\n| busy | 0.5 | 1 |\n| busy_64 |  | 12,340 |" in text
    assert "| rate | 1.5 |  |  |" in text
    assert text.endswith("It is <!-- value: race.rate -->1.5<!-- end --> times.")
    assert filled(text, tmp_path) == text
