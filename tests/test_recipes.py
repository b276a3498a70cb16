"""Recipes: each keeps only what differs from `recipes/grpo.py`, whose loop and phases `Run` repeats."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import re
import textwrap
from inspect import getsource
from pathlib import Path

import pytest

import forge_rl as rl
from forge_rl.errors import ConfigError
from forge_rl.flags.command_line import parse
from forge_rl.flags.config_file import dump
from forge_rl.flags.fields import usable_flags
from forge_rl.rewards.composition import WeightedSum
from forge_rl.run.launch import _show_plan
from recipes import agent_openai, dapo, grpo, reinforce, sft

RECIPES = Path(__file__).parent.parent / "recipes"
MOST = {"reinforce": 15, "dapo": 22, "ppo": 34, "distill": 45}
MOST |= {"sft": 22, "dpo": 17, "reward_model": 17}
MOST |= {"agent_command": 36, "agent_openai": 52, "code": 46, "mixture": 52, "tools": 54, "tree_search": 48}
MOST |= {"adapters": 30}
"""Most lines that a recipe has in place of lines of grpo.py."""


def body(source: str, name: str, run: str) -> list[ast.stmt]:
    """The statements of a function, with the run under one name."""
    tree = ast.parse(textwrap.dedent(source).replace(f"{run}.", "it.").replace(f"({run})", "(it)"))
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef) and node.name == name)
    return [
        statement
        for statement in function.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]


def test_the_run_repeats_the_loop_and_the_phases_of_grpo() -> None:
    (opened,) = body(getsource(grpo), "main", "run")
    assert isinstance(opened, ast.AsyncWith)
    loop = "\n".join(map(ast.unparse, opened.body)).replace("config.steps", "it.config.steps")
    ours = "\n".join(map(ast.unparse, body(getsource(rl.Run.train), "train", "self")))
    assert ours == loop.replace("config.evaluation", "it.config.evaluation").replace(
        "config.checkpoint_every", "it.config.checkpoint_every"
    )

    phases = calls(body(getsource(grpo), "step", "run")[1:])
    ours = calls(body(getsource(rl.Run.train_on), "train_on", "self")[1:])  # after the look at the advantages
    expected = [phase.replace("rl.pack", "pack") for phase in phases if "batch_advantages" not in phase]
    temperature = "temperature=it.generator.sampling.temperature"
    assert [phase.replace("temperature=temperature", temperature) for phase in ours] == expected


def calls(statements: list[ast.stmt]) -> list[str]:
    """The calls in statements, in their order."""
    calls = [node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in sorted(calls, key=lambda each: (each.lineno, each.col_offset))]


@pytest.mark.parametrize("name", MOST)
def test_a_recipe_differs_from_grpo_in_few_lines(name: str) -> None:
    base, recipe_lines = ((RECIPES / f"{recipe}.py").read_text().splitlines() for recipe in ("grpo", name))
    added = [line for line in difflib.ndiff(base, recipe_lines) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= MOST[name]


def test_every_recipe_is_compared_with_grpo() -> None:
    assert {path.stem for path in RECIPES.glob("[a-z]*.py")} == {"grpo", *MOST}


def test_dapo_has_its_authors_settings() -> None:
    generator = rl.GeneratorConfig(max_tokens=20480, max_model_len=32768)
    config = dapo.Config(generator=generator, trainer=rl.TrainerConfig(seq_len=32768))
    started = dapo.start(config)
    loss, rollouts = started.setup.loss, started.setup.rollouts
    assert rollouts is not None
    assert isinstance(loss, rl.ClippedSurrogate)
    assert (loss.clip_low, loss.clip_high, loss.dual_clip, loss.kl_coef) == (0.2, 0.28, 10, 0)
    assert loss.aggregation.kind == "token_mean"
    assert config.schedule.dynamic_sampling
    assert isinstance(rollouts.reward, WeightedSum)
    assert rollouts.reward.parts["overlong"] == (rl.build_reward(["overlong:max_tokens=20480,cache_tokens=4096"]), 1.0)
    assert "overlong" not in dapo.start(dapo.Config(overlong_share=0)).setup.rewards


def test_reinforce_needs_no_groups_and_dynamic_sampling_does() -> None:
    config = reinforce.Config()
    assert config.group_size == 1
    with pytest.raises(ConfigError, match="--group-size is 1"):
        reinforce.Config(advantages="reinforce_pp_baseline")
    with pytest.raises(ConfigError, match="dynamic-sampling"):
        reinforce.Config(schedule=rl.ScheduleConfig(dynamic_sampling=True))


def test_sources_are_the_tasks_or_else_those_of_the_environment() -> None:
    task_config = rl.TaskConfig(tasks=("sums=chain_sum",))
    assert list(task_config.sources(rl.SingleTurn).sources) == ["sums"]  # type: ignore[union-attr]
    game = rl.TaskConfig(env="game:highest=20")
    assert list(game.sources(rl.build_environment(game.env))) == ["game"]
    data = rl.DataConfig(overlap="leave-out")
    config = rl.TaskConfig(env="game", eval_tasks=("t=chain_sum",), data=data)
    assert config.sources(rl.build_environment("game")).overlap == "leave-out"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="none of its own"):
        rl.TaskConfig(env="tools").sources(rl.SingleTurn)


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("grpo", "--mixture.least 0.1", "--mixture.least has no effect, as --mixture.adapt is off"),
        ("grpo", "--curriculum.part math", "--curriculum.part has no effect, as --curriculum.pools is off"),
        ("grpo", "--schedule.kind one_step --schedule.max-lag 3", "--schedule.max-lag is 3, but with .*one_step"),
        ("grpo", "--schedule.kind synchronous --schedule.max-lag 3", "--schedule.max-lag is 3, but with .*synchronous"),
        ("grpo", "--checkpoint-mirror memory://x --checkpoint-every 0", "--checkpoint-mirror .*--checkpoint-every 0"),
        ("sft", "--group-size 4", "does not use --group-size"),
        ("sft", "--generator.max-tokens 32", "--generator.max-tokens needs engines"),
        ("dpo", "--schedule.retries 1", "--schedule.retries needs engines"),
        ("dpo", "--reward auto --schedule.max-lag 2", "--schedule.max-lag acts on batches that engines generate"),
        ("sft", "--trainer.router-replay", "--trainer.router-replay"),
        (
            "grpo",
            "--evaluation.every 0 --evaluation.temperature 0.5",
            "temperature has no effect, as --evaluation.every 0",
        ),
        (
            "grpo",
            "--evaluation.tasks 0 --evaluation.temperature 0.5",
            "temperature has no effect, as --evaluation.tasks 0",
        ),
        ("grpo", "--evaluation.success 0.5", "--evaluation.success has no effect, as pass@k"),
        (
            "grpo",
            "--checkpoint-every 0 --keep-checkpoints 5",
            "--keep-checkpoints has no effect, as --checkpoint-every 0",
        ),
        ("grpo", "--schedule.max-replaced 9", "--schedule.max-replaced has no effect, as no group is replaced"),
        ("grpo", "--lora.alpha 64", "--lora.alpha has no effect, as --lora.rank 0"),
        ("grpo", "--generator.max-lora-rank 32", "--generator.max-lora-rank has no effect, as engines have no room"),
        ("grpo", "--generator.gpu-memory-utilization 0.5", "utilization has no effect, as engines would run on CPU"),
        ("grpo", "--generator.enforce-eager", "--generator.enforce-eager has no effect, as engines would run on CPU"),
        ("grpo", "--weights.mirror-full-every 5", "has no effect, as no --weights.mirror"),
        (
            "grpo",
            "--weights.transport torchstore --weights.shm /tmp",
            "--weights.shm has no effect, as --weights.transport",
        ),
        ("grpo", "--recording.share 0 --recording.gib 2", "--recording.gib has no effect, as --recording.share 0"),
        ("grpo", "--generator.max-replicas 4", "--generator.max-replicas has no effect, as --job local"),
        ("grpo", "--job process:2 --trainer.wait-for-host-s 5", "wait-for-host-s has no effect, as no host comes"),
        ("grpo", "--generator.spares 1 --generator.restart.max-restarts 0", "--generator.spares replace engines"),
        ("grpo", "--trainer.stays-on-device", "on a CPU, so their state is moved nowhere"),
        ("grpo", "--curriculum.pools solve_rate", "'basic_arithmetic' generates new ones"),
        ("grpo", "--data.template {{question}}", "--data.template renders rows, and tasks are generated"),
        (
            "grpo",
            "--tasks ROWS:question=prompt --data.template {{prompt}}",
            "template has no effect, as all --tasks name",
        ),
        ("grpo", "--tasks ROWS:question=prompt ROWS --data.template {{prompt}}", ""),
        ("grpo", "--env game --eval-tasks t=ROWS --data.held-out-share 0.1", "held-out-share has no effect on the env"),
        ("grpo", "--env game --eval-tasks t=ROWS --data.overlap leave-out", ""),
        ("grpo", "--env game --reward.deadline-s 5", "--reward.deadline-s has no effect, as the environment scores"),
        ("ppo", "--gae.length-adaptive-alpha 0.05 --gae.lambda-policy 0.9", "--gae.lambda-policy 0.9 has no effect"),
        ("ppo", "--gae.length-adaptive-alpha 0.05", ""),
        ("ppo", "--value-pretraining-steps -1", "--value-pretraining-steps is -1"),
        ("ppo", "--critic.router-replay", "--critic.router-replay repeats the experts that engines chose"),
        ("grpo", "--data.max-bad-rows 0.1", "--data.max-bad-rows is of files"),
        ("grpo", "--data.overlap leave-out", "--data.overlap is of --eval-tasks, and there are none"),
        ("grpo", "--env game --reward math", "--reward has no effect, as the environment scores its episodes itself"),
        (
            "grpo",
            "--mixture.adapt success --mixture.least 0.9 --tasks chain_sum count_bits",
            "2 sources cannot each have",
        ),
        ("sft", "--evaluation.temperature 0.5", "--evaluation.temperature needs engines"),
        ("sft", "--tool-parser hermes", "--tool-parser needs engines"),
        ("sft", "--placement colocated", "--placement colocated is of trainer and engines"),
        ("dpo", "--reward auto --evaluation.blocking", "does not use --evaluation.blocking"),
        ("distill", "--teachers.models policy --teachers.replicas 2", "--teachers.replicas is of teachers' engines"),
        ("distill", "--teachers.models policy --loss distill --reward-coef 1", "--loss distill has no advantages"),
        ("grpo", "--loss distill", "learns from a teacher's tokens .top_ids, top_teacher., as distill does"),
        ("ppo", "--loss basic_arithmetic=distill clipped", "and the run has no teachers"),
        ("grpo", "--loss forge_rl.algorithms.value_loss:ValueLoss", "ValueLoss trains a value model, which generates"),
        ("grpo", "--loss forge_rl.algorithms.preferences:BradleyTerry", "BradleyTerry trains a value model"),
        ("distill", "--teachers.models policy --loss distill", ""),
        ("tree_search", "--fork-at entropy --env game", "--fork-at is of this recipe's worlds"),
        ("agent_command", "--environment.replicas 2", "does not use --environment.replicas"),
        ("agent_openai", "--environment.deadline-s 2", "does not use --environment.deadline-s"),
        ("grpo", "--mixture.adapt success", "--mixture.adapt success shifts weight between sources"),
        ("grpo", "--environment.replicas 2", "--environment.replicas is of processes of environments"),
        ("grpo", "--env tools:compact_above_chars=8000 --tasks chain_sum", "compacted above 8000 characters, and a"),
        ("grpo", "--env tools:compact_above_chars=4000 --tasks chain_sum", ""),
        ("grpo", "--schedule.kind synchronous --schedule.max-lag 0", ""),
        ("mixture", "--mixture.adapt off", ""),
        ("sft", "--reward auto --generator.max-tokens 32 --schedule.retries 1", ""),
        ("grpo", "--evaluation.every 0 --evaluation.tasks 0", ""),
        ("grpo", "--job process:2 --generator.max-replicas 4", ""),
        ("grpo", "--job process:2,most_replaced=1 --trainer.wait-for-host-s 5", ""),
        ("grpo", "--job process:2 --generator.enforce-eager", "as engines would run on CPU"),
        ("grpo", "--job slurm:nodes=1 --generator.enforce-eager --generator.gpu-memory-utilization 0.6", ""),
        ("grpo", "--job slurm:nodes=1 --trainer.enable-cpu-offload --trainer.stays-on-device", ""),
        ("grpo", "--job slurm:nodes=1 --trainer.seq-len 0", ""),
        ("grpo", "--job slurm:nodes=1 --generator.max-model-len 4096", ""),
        ("ppo", "--job slurm:nodes=1 --critic.enable-cpu-offload", ""),
        ("grpo", "--job process:2 --trainer.enable-cpu-offload", "on a CPU, so weights and optimizer state are in"),
        ("grpo", "--trainer.seq-len 0", "--trainer.seq-len is 0"),
        ("grpo", "--generator.max-model-len 4096", "episodes can have 4096 tokens, but a row"),
        ("ppo", "--critic.enable-cpu-offload", "on a CPU, so weights and optimizer state are in"),
        ("grpo", "--lora.rank 4 --lora.alpha 64", ""),
        ("grpo", "--generator.max-loras 2 --generator.max-lora-rank 32", ""),
        ("distill", "--teachers.models policy", ""),
        ("grpo", "--env game", ""),
        ("grpo", "--environment.replicas 2 --env tools --tasks chain_sum", ""),
        ("grpo", "--mixture.adapt success --mixture.most 0.8 --tasks chain_sum basic_arithmetic", ""),
    ],
)
def test_flags_without_an_effect_are_refused_by_name(recipe: str, flags: str, message: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"recipes.{recipe}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c", "answer": "d"}\n' * 2)
    examples = ["--tasks", str(tmp_path / "rows.jsonl")] if recipe in ("sft", "dpo") else []
    expected = pytest.raises(rl.ForgeError, match=message) if message else contextlib.nullcontext()
    with expected:
        texts = flags.replace("ROWS", str(tmp_path / "rows.jsonl")).split()
        config = parse(module.Config, recipe, [*texts, *examples])
        config.check_effects()
        if hasattr(module, "start"):
            module.start(config)


def test_unused_flags_are_in_neither_a_recipes_help_nor_its_files() -> None:
    for module, name in ((agent_openai, "environment"), (sft, "group_size")):
        assert name not in {flag.path[0] for flag in usable_flags(module.Config)}
        assert not re.search(rf"^\[?{name}\b", dump(module.Config()), re.MULTILINE)
    with pytest.raises(ConfigError, match="no group of flags 'environment'"):
        parse(agent_openai.Config, "prog", ["--help", "environment"])


def test_a_plan_refuses_what_a_start_would_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(a, b, c, d): return 1.0\n")
    config = grpo.Config(plan=True, rewards=(f"{tmp_path / 'mine.py'}:score",))
    with pytest.raises(ConfigError, match="cannot be called with a task and its episode"):
        _show_plan(config, grpo.main)
