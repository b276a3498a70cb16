"""The pages of docs/methods: every method has one, and its commands and lines of Python are accepted by the code."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast, get_args

import numpy as np
import pytest
import torch

import forge_rl as rl
from benchmarks.conformance.table import COMPARISONS
from forge_rl.algorithms.advantages import Estimator
from forge_rl.algorithms.correction import Correction
from forge_rl.algorithms.loss_flag import METHODS
from forge_rl.algorithms.losses import PolicyLoss
from forge_rl.algorithms.protocol import FlagNames
from forge_rl.algorithms.user_loss import try_loss
from forge_rl.flags.command_line import parse
from forge_rl.flags.fields import usable_flags
from forge_rl.types import Advantages
from recipes import agent_command, grpo, ppo
from tests.fakes import batch_of
from tools import methods
from tools.methods import FOLDER, ROOT, conformance, sections

PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem != "index")
COMMANDS = [
    (path.stem, line)
    for path in PAGES
    for fence in re.findall(r"```sh\n(.*?)```", path.read_text(), flags=re.DOTALL)
    for line in fence.splitlines()
]
SNIPPETS = [
    pytest.param(text, id=f"{path.stem}-{number}")
    for path in PAGES
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL))
]


def test_every_method_has_a_page() -> None:
    fronts = methods.methods().values()
    shown = [name for front in fronts for name in front.get("options", [])]
    assert sorted(name for name in shown if name in METHODS) == sorted(METHODS)
    estimators = [name for front in fronts for name in front.get("estimators", [])]
    assert sorted(estimators) == sorted(get_args(Estimator))
    told = "\n".join(path.read_text() for path in PAGES)
    for name in (each for each in rl.__all__ if each.endswith("_advantages") or each in {"RoleBaselines", "LossSum"}):
        assert f"rl.{name}" in told, name
    compared = {name for front in fronts for name in front.get("compared", [])}
    assert compared == {each.method for each in COMPARISONS}
    assert compared >= set(conformance())


@dataclass(frozen=True, kw_only=True)
class Unlisted(PolicyLoss):
    """A loss that somebody has just written."""


@dataclass(frozen=True, kw_only=True)
class Named(PolicyLoss):
    """A loss with a name for the flag."""

    flag_names: ClassVar[FlagNames] = {"named": {}}


def test_each_loss_has_a_page_and_a_public_name() -> None:
    assert methods.lacking(methods.losses(), methods.methods(), rl.__all__) == []
    assert {kind.__name__ for kind in methods.losses()} >= {"Cispo", "ClipCov", "Distillation", "Dpo", "ValueLoss"}
    assert methods.lacking([Unlisted, Named], methods.methods(), [*rl.__all__, "Named"]) == [
        "Unlisted is on no page: give it `flag_names`, or name it in the `code` of one",
        "Unlisted is not public: add its line to forge_rl/__init__.pyi",
        "--loss named (Named) has no page: add docs/methods/named.md with `options: [named]`",
    ]


def test_the_navigation_has_every_page_once() -> None:
    config = methods.on_config({"nav": [{"Start": "index.md"}, {"Methods": ["methods/index.md"]}]})
    sections_by_kind = {kind: pages for section in config["nav"][1]["Methods"][1:] for kind, pages in section.items()}
    pages = [page for pages_of_kind in sections_by_kind.values() for page in pages_of_kind]
    assert sorted(pages) == sorted(f"methods/{path.name}" for path in PAGES)
    assert tuple(sections_by_kind) == methods.KINDS


def test_pages_of_flags_and_options_have_all_of_them() -> None:
    flags = methods.flags_by_group()
    assert "| `--schedule.max-lag` | `1` | Maximum versions between" in flags
    assert "| `--cache` | `~/.cache/forge_rl` |" in flags
    for recipe in (grpo, ppo, agent_command):
        for flag in usable_flags(recipe.Config):
            assert flags.count(f"| `{flag.name}` |") == 1, flag.name
    assert str(ROOT) not in flags
    for flag, names in methods.NAMES.items():
        headings = re.findall(r"^### `(\w+)` ", methods.options_by_name(flag), flags=re.MULTILINE)
        assert headings == sorted(name for name in names if name)
    options = "\n".join(map(methods.options_by_name, methods.NAMES))
    for row in (
        "| `problem` |  | Column that identifies the problem",
        "| `highest` | `20` | Highest number to guess. |",
        "| `corpus` |  | Texts to search",
        "| `folder` | required | A task, a folder of tasks",
        "| `package` |  | Packages to install",  # of VerifiersSettings
        "| any other |  | Options of `gymnasium.make`. |",
        "| `tokens` | required |",
        "| `shm` | `'16Gi'` | Size of /dev/shm",
    ):
        assert row in options, row


@pytest.mark.parametrize("name", ["flags", "options"])
def test_a_page_of_the_reference_is_filled(name: str) -> None:
    path = ROOT / "docs" / "reference" / f"{name}.md"
    page = SimpleNamespace(file=SimpleNamespace(src_uri=f"reference/{name}.md"))
    text = methods.on_page_markdown(path.read_text(), page, None, None)
    assert re.search(r"<!-- (flags|options)", path.read_text())
    assert not re.search(r"<!-- (flags|options)", text)


def test_the_index_is_up_to_date() -> None:
    page = (FOLDER / "index.md").read_text()
    assert methods.index(page) == page


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_has_a_formula_its_options_and_its_code(page: Path) -> None:
    front = methods.front_of(page)
    text = page.read_text()
    assert "\n$$\n" in text
    assert f"\n# {front['title']}" in text
    for key in ("options", "code"):
        if key in front:
            assert f"## {key.title()}\n" in sections(front)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}-{line[10:60]}" for page, line in COMMANDS])
def test_a_command_on_a_page_is_accepted(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pairs.jsonl").write_text('{"prompt": "2+3?", "chosen": "5", "rejected": "6"}\n')
    rows = [json.dumps({"question": f"{n}+3?", "problem": f"{n}+3?", "solution": str(n + 3)}) for n in range(40)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    python, flag, name, *arguments = shlex.split(line)
    assert (python, flag) == ("python", "-m")
    recipe = importlib.import_module(name)
    started = recipe.start(parse(recipe.Config, name, arguments))  # opens nothing yet
    try_loss(started.setup.loss, started.setup.mixture.sources)
    assert started.setup.rollouts or started.setup.examples


@pytest.mark.parametrize("text", SNIPPETS)
def test_lines_of_python_on_a_page_run(text: str) -> None:
    group = [(1.0, [([1, 2], [3, 4])]), (0.0, [([1, 2], [5])]), (1.0, [([1], [3])]), (0.0, [([1], [6, 7, 8])])]
    batch = batch_of(group, [(reward / 2, turns) for reward, turns in group], group)
    for episode in batch.episodes:
        assert episode.score is not None
        object.__setattr__(episode, "score", replace(episode.score, parts={"correct": episode.reward, "length": 1.0}))
        episode.task.truth.setdefault("player", "first")
        episode.task.truth.setdefault("answer", "5")
    sizes = [len(each.turns) for each in batch.episodes]
    names: dict[str, Any] = {
        "rl": rl,
        "np": np,
        "batch": batch,
        "run": _Run(),
        "__name__": "page",
    }
    names["reference"] = [np.zeros(each.response_tokens) for each in batch.episodes]
    code = compile(text, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if inspect.isawaitable(done := eval(code, names)):
        asyncio.run(cast(Any, done))
    if "advantages" in names:
        advantages: Advantages = names["advantages"]
        assert len(advantages) == 3
    if "loss" in names:
        try_loss(names["loss"])
    if "score" in names:
        assert [len(names["score"](each.task, each).turns) for each in batch.episodes] == sizes


class _Run:
    """What the lines use of a run."""

    @property
    def rollouts(self) -> _Run:
        return self

    async def greedy_rewards(self, batch: rl.Batch) -> torch.Tensor:
        return torch.ones(len(batch.groups))

    def keep(self, name: str, thing: object) -> None:
        assert hasattr(thing, "state_dict")


def test_a_formula_becomes_mathml_without_a_script() -> None:
    page = '<p><span class="arithmatex">\\(a &lt; b\\)</span></p><div class="arithmatex">\\[\n\\frac{1}{2}\n\\]</div>'
    pytest.importorskip("latex2mathml")
    found = methods.on_page_content(page, None, None, None)
    assert found.count("<math") == 2
    assert 'class="formula"' in found
    assert "arithmatex" not in found


def test_a_table_has_each_presets_settings() -> None:
    shown = sections({"presets": True, "options": ["forge_rl.algorithms.correction:Correction correction."]})
    for name in Correction.presets:
        assert f"| `{name}` |" in shown
    assert "| `tis` | `recompute` | `truncate` | `token` | `0.0` | `2.0` |  |" in shown
    assert "| `correction.high` | `inf` |" in shown


def test_code_of_one_case_leaves_the_others_out() -> None:
    shown = methods.source_of("forge_rl.algorithms.advantages:_in_groups[rloo]")
    assert 'case "rloo"' in shown
    assert 'case "grpo"' not in shown
    assert '"""' not in shown


def test_a_picture_is_shown_only_if_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "ROOT", tmp_path)
    (tmp_path / "docs" / "pictures" / "methods").mkdir(parents=True)
    (tmp_path / "docs" / "pictures" / "methods" / "one.svg").touch()
    assert "pictures/methods/one.svg" in sections({"curves": ["one", "two"]})
    assert "two" not in sections({"curves": ["one", "two"]})
    assert tmp_path != ROOT
