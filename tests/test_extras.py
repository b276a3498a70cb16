"""Optional packages: forge_rl runs on a user's own data without them, and a feature that needs one names its extra."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_rl.data.data_config import DataConfig
from forge_rl.envs.env_flag import build_environment
from forge_rl.errors import ConfigError
from forge_rl.metrics import TensorBoardSink, WandbSink
from forge_rl.models import bundled
from forge_rl.rewards.reward_flag import build_reward
from forge_rl.sandbox.providers.containers import container_provider
from tests.commands import Command, tiny_run
from tests.fake_engine import FOLDER

ROOT = Path(__file__).parent.parent
OPTIONAL = ("IPython", "accelerate", "gguf", "gymnasium", "mcp", "openai", "reasoning_gym", "tensorboard", "textarena")
"""Packages of extras, less torchstore and wandb, which may not be here, and websockets, which uvicorn imports."""


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("accelerate", "bundled", bundled._find_gguf),
        ("gguf", "bundled", bundled._find_gguf),
        *((name, name, lambda name=name: container_provider(name)) for name in ("daytona", "e2b", "modal")),
        ("gymnasium", "gymnasium", lambda: build_environment("gymnasium:FrozenLake-v1")),
        ("mcp", "mcp", lambda: build_environment("mcp:python server.py")),
        ("openai", "openai", lambda: build_environment("user:model=m,api_key_env=")),
        ("openai", "openai", lambda: build_reward(["judge:model=m,api_key_env="])),
        ("reasoning_gym", "reasoning-gym", lambda: DataConfig().build(["chain_sum"], seed=0).draw_from("chain_sum")),
        ("tensorboard", "tensorboard", lambda: TensorBoardSink(Path("curves"))),
        ("textarena", "textarena", lambda: build_environment("textarena:GuessTheNumber-v0")),
        ("wandb", "wandb", lambda: WandbSink("papers")),
        ("websockets", "openenv", lambda: build_environment("openenv:ws://127.0.0.1:1")),
    ],
)
def test_a_feature_whose_package_is_missing_names_the_extra_in_one_line(
    package: str, extra: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"needs {package}, which is not installed") as caught:
        use()
    assert caught.value.hint == f"pip install 'forge_rl[{extra}]'"
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    assert package in {re.split(r"[>=<]", requirement)[0].replace("-", "_") for requirement in listed}


def test_a_run_without_optional_packages_reaches_its_end(
    commands: list[Command], run_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on a user's file needs none of them."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        f"PathFinder.find_spec = lambda name, *given: None if name in {OPTIONAL} else find(name, *given)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ["PYTHONPATH"]]))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    rows = [{"question": f"{n} + 1 = ?", "answer": n + 1} for n in range(12)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run"
    flags = ("--tasks", str(tmp_path / "sums.jsonl"), "--evaluation.every", "0", "--steps", "2")
    command = tiny_run(commands, run_model, out, *flags, recipe="tests.tiny_fake")
    command.wait_for("step +1/2")  # now all its processes are seen
    assert command.end(240) == 0, command.output
    assert "no TensorBoard curves: drawing curves needs tensorboard, which is not installed; pip" in command.output
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("finished", 2)
    assert command.strays() == []
