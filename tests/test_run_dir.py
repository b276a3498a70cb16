"""The run folder: continued by the same command, refused to another one."""

import errno
import fcntl
import importlib
import json
import os
import pkgutil
import shutil
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import forge_rl as rl
import recipes
from forge_rl.engines.architecture import stored_bytes
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.flags.categories import Category, OfCommand, Operational, Tunable
from forge_rl.flags.fields import flags_of
from forge_rl.gateway.agent_command import AgentCommand, AgentFunction
from forge_rl.rollout.agent_runner import Agent
from forge_rl.run.checkpoints.files import Checkpoints
from forge_rl.run.records import run_dir
from forge_rl.run.records.run_dir import check_space, choose_folder, code_digests, prepare_folder, versions
from forge_rl.run.run_config import RunConfig
from forge_rl.run.run_models import RunModels
from forge_rl.run.start.checks import check_disk
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.services.trainer_config import CriticConfig
from recipes import grpo


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: Tunable[float] = 0.1
    decay: str = "constant"


@dataclass(frozen=True, kw_only=True)
class Trainer:
    ranks: Operational[int] = 1
    seq_len: Operational[int] = 32
    optimizer: Optimizer = field(default_factory=Optimizer)


@dataclass(frozen=True, kw_only=True)
class Weights:
    CATEGORY: ClassVar[Category] = Category.OPERATIONAL
    shm: str = "/dev/shm"


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: Tunable[int] = 2
    group_size: int = 8
    display: OfCommand[str] = "auto"
    force_continue: OfCommand[bool] = False
    trainer: Trainer = field(default_factory=Trainer)
    weights: Weights = field(default_factory=Weights)
    rewards: Tunable[tuple[str, ...]] = ("exact",)


@pytest.mark.parametrize(
    ("category", "names"),
    [
        (Category.OF_COMMAND, "out display plan target.on isolation.pass_env job cache prometheus"),
        (Category.OPERATIONAL, "trainer.ranks trainer.seq_len trainer.tensor_parallel_degree trainer.deadline_s"),
        (Category.OPERATIONAL, "critic.ranks critic.seq_len gateway.port gateway.agent_limits.cpu_s"),
        (Category.OPERATIONAL, "generator.replicas generator.max_num_seqs generator.restart.max_restarts weights.shm"),
        (Category.OPERATIONAL, "schedule.retries evaluation.every recording.share data.max_bad_rows alerts.command"),
        (
            Category.TUNABLE,
            "steps trainer.optimizer.lr critic.epochs schedule.max_lag mixture.least generator.max_tokens",
        ),
        (Category.TUNABLE, "rewards eval_tasks"),
        (Category.DEFINING, "model seed group_size loss trainer.dtype trainer.optimizer.decay generator.temperature"),
        (Category.DEFINING, "evaluation.episodes data.template curriculum.pools tasks env advantages"),
    ],
)
def test_flags_have_the_categories_of_their_fields_in_each_recipe(category: Category, names: str) -> None:
    modules = [importlib.import_module(f"recipes.{module.name}") for module in pkgutil.iter_modules(recipes.__path__)]
    configs = [module.Config for module in modules if hasattr(module, "Config")]
    categories = {(flag.dotted, flag.category) for config in configs for flag in flags_of(config)}
    for name in names.split():
        assert {kind for flag, kind in categories if flag == name} == {category}, name


def begin(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 0}\n')


def chosen(config: Config) -> Path:
    return choose_folder(config, "grpo", None)[0]


def test_the_same_command_gets_the_same_folder_until_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = chosen(Config())
    assert first.parent == Path("runs")
    prepare_folder(first, Config())
    assert chosen(Config(display="plain", weights=Weights(shm="/mnt"))) == first
    assert chosen(Config(trainer=Trainer(optimizer=Optimizer(lr=0.2)))) != first
    (first / "summary.json").write_text(json.dumps({"steps": 2}))
    assert chosen(Config()) == Path(f"{first}-2")


@pytest.mark.parametrize(
    ("function", "name"),
    [
        *(("stat", name) for name in ("config.json", "summary.json", "metrics.jsonl")),
        *(("read_text", name) for name in ("config.json", "summary.json", "versions.json")),
    ],
)
def test_a_folder_that_cannot_be_read_is_not_taken_for_a_new_one(
    function: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_folder(tmp_path / "run", Config())
    begin(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text('{"outcome": "stopped"}')
    intact = getattr(Path, function)

    def failing(path: Path, **options: bool) -> object:
        if path.name == name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return intact(path, **options)

    monkeypatch.setattr(Path, function, failing)
    with pytest.raises((CheckpointError, ConfigError), match=rf"{name} cannot be read: .*Stale") as caught:
        choose_folder(Config(), "grpo", tmp_path / "run")
    assert "once it can be read" in caught.value.hint


def test_another_config_is_refused_and_the_flag_named_unless_one_insists(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "run", Config())
    other = Config(group_size=4)
    assert choose_folder(other, "grpo", tmp_path / "run")[0] == tmp_path / "run", (
        "a failed start left nothing to resume"
    )
    begin(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"--group-size was 8, is 4") as raised:
        choose_folder(other, "grpo", tmp_path / "run")
    assert "--force-continue" in raised.value.hint
    _, notes = choose_folder(replace(other, force_continue=True), "grpo", tmp_path / "run")
    assert notes == ["the run is continued with changes: --group-size was 8, is 4"]


def test_what_errors_advise_may_change_and_is_told(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "run", Config())
    advised = Config(
        steps=5,
        display="plain",
        trainer=Trainer(seq_len=64, ranks=2, optimizer=Optimizer(lr=0.2)),
        weights=Weights(shm="/mnt"),
        rewards=("length",),
    )
    _, (note,) = choose_folder(advised, "grpo", tmp_path / "run")
    for line in (
        "--trainer.seq-len was 32, is 64",
        "--trainer.ranks",
        "--trainer.optimizer.lr",
        "--steps",
        "shm",
        "--reward was",
    ):
        assert line in note
    assert "display" not in note


def test_other_steps_are_refused_where_the_learning_rate_would_jump(tmp_path: Path) -> None:
    decaying = Config(trainer=Trainer(optimizer=Optimizer(decay="linear")))
    prepare_folder(tmp_path / "run", decaying)
    begin(tmp_path / "run")
    with pytest.raises(ConfigError, match="--steps was 2, is 5, over which the learning rate decays"):
        choose_folder(replace(decaying, steps=5), "grpo", tmp_path / "run")
    choose_folder(replace(decaying, steps=5, force_continue=True), "grpo", tmp_path / "run")


def test_a_flag_that_the_run_did_not_know_is_no_change(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "run", Config())
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    del saved["group_size"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(saved))
    assert choose_folder(Config(), "grpo", tmp_path / "run") == (tmp_path / "run", [])


@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_from_before_adapters_had_a_dtype_keeps_float32(rank: int, tmp_path: Path) -> None:
    config, folder = grpo.Config(lora=LoRAConfig(rank=rank)), tmp_path / "run"
    prepare_folder(folder, config)
    begin(folder)
    saved = json.loads((folder / "config.json").read_text())
    del saved["lora"]["dtype"]
    (folder / "config.json").write_text(json.dumps(saved))
    if rank:
        with pytest.raises(ConfigError, match=r"--lora\.dtype was 'float32', is 'bfloat16'"):
            choose_folder(config, "grpo", folder)
        config = grpo.Config(lora=LoRAConfig(rank=rank, dtype="float32"))
    assert choose_folder(config, "grpo", folder) == (folder, [])


def test_a_file_in_place_of_the_folder_is_told_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match=r"--out .*run is a file"):
        choose_folder(Config(), "grpo", tmp_path / "run")


@pytest.mark.parametrize(("backoff_s", "expected"), [(1.0, ""), (2.5, "was 2.5, is no longer a flag, and always 1.0")])
def test_a_flag_that_became_a_constant_is_told_only_if_the_run_had_set_it(
    backoff_s: float, expected: str, tmp_path: Path
) -> None:
    prepare_folder(tmp_path / "run", Config())
    begin(tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    restart = {"max_restarts": 5, "backoff_s": backoff_s}
    (tmp_path / "run" / "config.json").write_text(json.dumps(saved | {"generator": {"restart": restart}}))
    folder, notes = choose_folder(Config(), "grpo", tmp_path / "run")
    change = f"the run is continued with changes: --generator.restart.backoff-s {expected}"
    assert (folder, notes) == (tmp_path / "run", [change] if expected else [])


@dataclass(frozen=True, kw_only=True)
class Elastic(Config):
    generator: GeneratorConfig = field(default_factory=lambda: GeneratorConfig(replicas=2, min_replicas=1))


@pytest.mark.parametrize("saved_replicas", [1, 0])
def test_a_flag_under_its_earlier_name_is_compared_with_the_current_one(saved_replicas: int, tmp_path: Path) -> None:
    config = Elastic()
    prepare_folder(tmp_path / "run", config)
    begin(tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    del saved["generator"]["min_replicas"]
    saved["generator"]["least_replicas"] = saved_replicas
    (tmp_path / "run" / "config.json").write_text(json.dumps(saved))
    if saved_replicas:
        assert choose_folder(config, "grpo", tmp_path / "run") == (tmp_path / "run", [])
    else:
        with pytest.raises(ConfigError, match=r"--generator\.min-replicas was 0, is 1"):
            choose_folder(config, "grpo", tmp_path / "run")


def test_a_run_with_a_retired_flag_in_a_group_that_is_left_is_continued(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "run", Config())
    begin(tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    saved |= {"alerts": {"deadline_s": 10.0}, "curriculum": {"pools": "off", "momentum": 0.25, "most_tasks": 1_000_000}}
    (tmp_path / "run" / "config.json").write_text(json.dumps(saved))
    _, notes = choose_folder(Config(), "grpo", tmp_path / "run")
    change = "--curriculum.momentum was 0.25, is no longer a flag, and always 0.5"
    assert notes == [f"the run is continued with changes: {change}"]


def test_edited_code_is_refused_once_there_is_something_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "rewards_of_mine.py"

    def digests(text: str) -> dict[str, str]:
        source.write_text(text)
        return code_digests(partial(importlib.import_module("rewards_of_mine").score, 1), Path, Config())

    digest_of = digests('def score(task, text):\n    """Score."""\n    return 1.0')
    assert set(digest_of) == {"rewards_of_mine.py", "test_run_dir.py"}
    assert digests("# a comment\ndef score(task, text):\n    return 1.0\n") == digest_of
    edited = digests("def score(task, text):\n    return 2.0\n")

    run = tmp_path / "run"
    prepare_folder(run, Config(), digest_of)
    assert choose_folder(Config(), "grpo", run, digest_of) == (run, [])
    change = "rewards_of_mine.py was edited"
    assert choose_folder(Config(), "grpo", run, edited) == (run, [f"the run is continued with changes: {change}"])
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=change):
        choose_folder(Config(), "grpo", run, edited)
    choose_folder(Config(force_continue=True), "grpo", run, edited)


def test_an_edit_of_an_agents_code_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("def solve(task): return '5'")
    agents: list[Agent | str] = ["agent.py:solve", "agent:solve", AgentFunction("agent.py:solve")]
    agents += [AgentCommand("python agent.py --turns 3"), AgentCommand([sys.executable, str(tmp_path / "agent.py")])]
    rows = [{"question": "1?", "answer": "1"}]
    for agent in agents:

        def digests(agent: Agent | str = agent) -> dict[str, str]:
            starting = rl.start(
                grpo.Config(), loss=rl.build_loss(["clipped"]), sources=rows, reward=lambda task, text: 1.0, agent=agent
            )
            return starting._code()

        (tmp_path / "agent.py").write_text("def solve(task): return '5'")
        code = digests()
        (tmp_path / "agent.py").write_text("# said again\ndef solve(task):\n    return '5'")
        assert digests() == code
        (tmp_path / "agent.py").write_text("def solve(task): return '6'")
        assert {name for name, digest in digests().items() if digest != code[name]} == {"agent.py"}, agent
    (tmp_path / "agent.py").write_text("def")
    assert digests().keys() == code.keys()
    assert AgentCommand([sys.executable, "-c", "x" * 9999]).files == ()


def test_files_of_one_name_have_a_digest_each(tmp_path: Path) -> None:
    def digests() -> dict[str, str]:
        return code_digests(*(SimpleNamespace(files=[tmp_path / path]) for path in paths))

    paths = ["maths/a/rubric.md", "code/a/rubric.md", "code/notes.md", "code/a/rubric.md"]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    first_digests = digests()
    assert set(first_digests) == {"maths/a/rubric.md", "code/a/rubric.md", "notes.md"}
    (tmp_path / paths[0]).write_text("edited")
    edited_digests = digests()
    assert {name for name in edited_digests if edited_digests[name] != first_digests[name]} == {"maths/a/rubric.md"}
    # A path with .. is the same file.
    paths = ["maths/a/rubric.md", "code/../maths/a/rubric.md", "code/a/rubric.md", "code/notes.md"]
    assert digests() == edited_digests


def test_an_edit_is_seen_where_files_of_the_same_name_come_and_go() -> None:
    old_code = {"r.md": "1", "a/s.md": "2", "b/s.md": "3"}
    assert not run_dir._is_edited("x/r.md", {"x/r.md": "1", "y/r.md": "4"}, old_code)
    assert not run_dir._is_edited("y/r.md", {"x/r.md": "1", "y/r.md": "4"}, old_code), "it is new"
    assert run_dir._is_edited("x/r.md", {"x/r.md": "5", "y/r.md": "4"}, old_code)
    assert not run_dir._is_edited("s.md", {"s.md": "3"}, old_code)
    assert run_dir._is_edited("s.md", {"s.md": "6"}, old_code)
    assert not run_dir._is_edited("t.md", {"t.md": "7"}, old_code), "it is new"


def test_a_new_folder_says_which_run_is_there_and_how_to_extend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, notes = choose_folder(Config(), "grpo", None)
    assert notes == []
    prepare_folder(first, Config())
    (first / "checkpoints" / "step-000002").mkdir(parents=True)
    (first / "summary.json").write_text(json.dumps({"steps": 2}))
    next_folder, (note,) = choose_folder(Config(), "grpo", None)
    assert next_folder != first
    assert f"{first} is finished, with the same settings; to extend that one instead: --out {first} --steps N" in note
    _, (note,) = choose_folder(Config(steps=9), "grpo", None)
    assert "--steps was 2, is 9" in note
    assert choose_folder(Config(group_size=4), "grpo", None)[1] == [], "no run that one could extend"


def test_a_finished_run_is_continued_only_with_more_steps(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "run", Config())
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"steps": 2}))
    with pytest.raises(ConfigError, match="finished after 2 steps"):
        choose_folder(Config(), "grpo", tmp_path / "run")
    choose_folder(Config(steps=3), "grpo", tmp_path / "run")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="not a run folder"):
        choose_folder(Config(), "grpo", tmp_path)


def test_two_processes_cannot_share_a_folder_nor_two_runs_of_one(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "run", Config())
    with pytest.raises(CheckpointError, match=r"this process has a run in .* already") as caught:
        prepare_folder(tmp_path / "run", Config())
    assert caught.value.hint == "close it first: await run.close()"
    (tmp_path / "run" / ".lock").write_text("process 7 on otherhost\n")
    with pytest.raises(CheckpointError, match=r"another process runs in .*: process 7 on otherhost"):
        prepare_folder(tmp_path / "run", Config())


def test_a_home_in_a_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = RunConfig(out=Path("~/run"), cache=Path("~/cache"))
    assert (config.out, config.cache) == (tmp_path / "run", tmp_path / "cache")
    assert RunConfig(out=Path("runs/~")).out == Path("runs/~")


def test_a_file_system_without_locks_is_not_taken_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(CheckpointError, match=r"cannot be locked, .*: No locks available") as caught:
        prepare_folder(tmp_path / "run", Config())
    assert "NFS" in caught.value.hint


def test_too_little_space_and_an_unwritable_folder_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="free"):
        check_space(tmp_path, 1 << 60)
    check_space(tmp_path, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        prepare_folder(tmp_path / "file" / "run", Config())


def test_a_resumed_run_needs_space_only_for_checkpoints_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    config = grpo.Config(checkpoint_every=1, keep_checkpoints=2)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    prepared: Any = SimpleNamespace(folder=tmp_path, checkpoints=checkpoints)

    def check(free: int, critic: CriticConfig | None = None) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        check_disk(config, prepared, RunModels(policy=tmp_path, critic=critic))

    checkpoint_bytes = 7 * stored_bytes(tmp_path)
    # Two that are kept, the best, and one that is being written: the last needs room even if more were kept before.
    for saved, missing in ((0, 4), (2, 2), (3, 1), (5, 1)):
        for step in range(saved):
            (checkpoints.folder / f"step-{step:06d}").mkdir(parents=True, exist_ok=True)
        check(missing * checkpoint_bytes)
        with pytest.raises(CheckpointError, match="still has to write"):
            check(missing * checkpoint_bytes - 1)
    check(2 * checkpoint_bytes, CriticConfig())
    with pytest.raises(CheckpointError, match="still has to write"):  # a critic's state is as large as the policy's
        check(2 * checkpoint_bytes - 1, CriticConfig())


def test_the_versions_name_packages_python_and_commit() -> None:
    version_of = versions()
    assert {"python", "git", "torch", "torchtitan"} <= set(version_of)
