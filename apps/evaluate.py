"""Evaluate models on the same tasks, and compare them.

python -m apps.evaluate smollm2-135m runs/grpo-1/checkpoints/best --tasks chain_sum leg_counting

A model is a bundled model's name, a folder, a hub id, a run's folder (for its newest checkpoint) or a checkpoint's
folder. Models are loaded one at a time. Results are kept in the folder --out, and the same command resumes from there,
also with more models.

python -m apps.evaluate runs/grpo-1/checkpoints/step-* --benchmark gsm8k humaneval=HumanEval.jsonl
python -m apps.evaluate runs/grpo-1 --env world.py:Echo --tasks train.jsonl

run well-known benchmarks (--benchmark list describes them), and episodes in an environment or by an agent. Episodes are
kept whole: forge-rl show OUT/MODEL prints them.

python -m apps.evaluate runs/grpo-1/checkpoints/best --lm-eval arc_easy gsm8k
python -m apps.evaluate runs/grpo-1 --lm-eval arc_easy --live --limit 200

runs tasks of lm-eval instead, through a gateway for the model or, with --live, the gateway of a live run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from forge_rl.algorithms.evaluation import Comparison
from forge_rl.data.data_config import ONE_DIGIT_ADDITION, DataConfig
from forge_rl.data.mixture import Mixture
from forge_rl.data.sources import ReasoningGymSource
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.engines.architecture import read_served
from forge_rl.engines.context import positions, with_longest_context
from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.protocol import AgentEnvironment
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import CheckpointError, ConfigError, check_flags
from forge_rl.flags.fields import check_idle
from forge_rl.flags.texts import names_code
from forge_rl.gateway import GatewayConfig, GeneratorBackend
from forge_rl.gateway.agent_command import AgentCommand, code_file
from forge_rl.gateway.agents import Agent, serving_agents
from forge_rl.harness.benchmarks import benchmark, benchmark_source
from forge_rl.harness.comparisons import check_scored, compare, pairs_of, print_comparisons, score
from forge_rl.harness.evaluated import EpisodeKeeper, keep_scores
from forge_rl.harness.lm_eval import (
    MOST_CONTEXT,
    Endpoint,
    LmEvalConfig,
    find_python,
    lm_eval_settings,
    run_lm_eval,
    scores_of,
)
from forge_rl.harness.results_file import Results, Sets, check_settings, results_name, short_digest
from forge_rl.harness.score_tables import print_benchmarks, print_scores, short_names
from forge_rl.models.bundled import default_cache
from forge_rl.models.digests import file_digest
from forge_rl.models.resolve import find_model
from forge_rl.rewards.by_source import RewardBySource
from forge_rl.rewards.composition import WeightedSum
from forge_rl.rewards.reward_flag import RewardTexts, build_reward
from forge_rl.rollout.dispatcher import Dispatcher
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.rollout.evaluation import EvalTasks, Evaluation, describe_failure
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.interfaces import RunEpisode
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.reward_outage import EpisodeScoring
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.launch import launch
from forge_rl.run.live.attach import attach
from forge_rl.run.records.json_files import check_report, write_report
from forge_rl.run.records.run_dir import as_json, code_digests, versions
from forge_rl.runtime.isolation import Isolation, check_isolation
from forge_rl.runtime.processes import responsive_loop
from forge_rl.services.environment import Environment
from forge_rl.services.generator import Generator
from forge_rl.services.reward import RewardFunction, RewardService, parts_of
from forge_rl.system.folders import make_private
from forge_rl.system.tasks import interrupted_by, task_group
from forge_rl.system.terminal import visible
from forge_rl.tokens.stops import describe_added_stop
from forge_rl.tokens.template_args import TemplateArgTexts, read_template_args
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.tokens.tool_parsers import ToolParser
from forge_rl.types import Episode, Outcome, Sampling, Task

from . import gateway

_PROMPT_TOKENS = 2048
"""Room for a benchmark's prompt."""
_COMMAND = "command:"
_CONCURRENCY = "--generator.max-num-seqs"
"""Flag of the engines that also limits lm-eval's requests to a live run."""
_OF_EPISODES = (
    *("tasks", "benchmark", "env", "agent", "template_args", "tool_parser", "data", "rewards", "evaluation"),
    *("episodes", "temperature", "success", "reward", "environment"),
)
_OF_LM_EVAL = tuple(
    f"lm_eval.{name}" for name in ("lm_eval_python", "include_path", "limit", "num_fewshot", "chat_template")
)
_OFTEN_CUT = 0.1
"""Warn above this share of cut answers."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Evaluate models on the same tasks, and compare them."""

    UNUSED: ClassVar[tuple[str, ...]] = ("data.overlap",)
    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names of bundled models, hub ids, or folders of models, checkpoints, or runs, for their newest checkpoints."""
    tasks: tuple[str, ...] = ()
    """Task sets, each as [NAME=]TASKS[:KEY=VALUE,...]: files, folders, hub ids, FILE.py:NAME, or reasoning-gym data
    sets, whose held-out part is used. Keys of files name columns: test.jsonl:question=problem,answer=gold. By default
    the tasks of --benchmark or of --env, or one-digit additions."""
    benchmark: tuple[str, ...] = ()
    """Well-known benchmarks with their own prompts and rewards, each as NAME[@REVISION][=FILE]: from the hub, or from a
    file with the same rows. list describes them. Raise --evaluation.tasks for all of their tasks."""
    env: str = ""
    """Environment, as in training: MODULE:CLASS, FILE.py:CLASS or NAME[:KEY=VALUE,...]."""
    agent: str = ""
    """Agent that works on the tasks at a gateway: MODULE:FUNCTION or FILE.py:FUNCTION, or a command in any language, as
    command:PROGRAM ARGUMENTS."""
    template_args: TemplateArgTexts = ()
    tool_parser: str = ""
    """Name of vLLM's parser of the models' tool calls; by default the one that reads back the calls that the chat
    template writes."""
    data: DataConfig = field(default_factory=DataConfig)
    rewards: RewardTexts = ("auto",)
    evaluation: EvalTasks = field(default_factory=EvalTasks)
    episodes: int = 1
    """k, the episodes per task. Scores are avg@k, pass@2, pass@4, ... pass@k, and maj@k if answers are extracted."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    success: float = 1.0
    """Minimum reward of a successful episode, for pass@k."""
    seed: int = 0
    """Seed of the sampling."""
    lm_eval: Annotated[LmEvalConfig, tyro.conf.OmitArgPrefixes] = field(default_factory=LmEvalConfig)
    generator: Generator.Config = field(default_factory=Generator.Config)
    """The engines. Completions have up to --generator.max-tokens tokens. lm-eval's tasks set their own limit, and
    their context is as long as the model and --generator.kv-cache-gib allow, up to 8192 tokens, unless
    --generator.max-model-len is set."""
    reward: RewardService.Config = field(default_factory=RewardService.Config)
    environment: Environment.Config = field(default_factory=Environment.Config)
    out: Path | None = None
    """Folder for results; by default a folder under runs/ named by a digest of the settings."""
    json: Path | None = None
    """JSON file for scores and comparisons."""
    cache: Path = field(default_factory=default_cache)
    """Folder for bundled models, which are built on first use."""
    isolation: Annotated[Isolation, tyro.conf.OmitArgPrefixes] = field(default_factory=Isolation)

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"episodes": 1, "temperature": 0}, maximum={"temperature": 2})
        check_flags(self.evaluation, "--evaluation.", minimum={"tasks": 1})
        read_template_args(self.template_args)
        if self.lists_benchmarks:
            return
        for text in self.benchmark:
            benchmark(text)
        if self.agent and self.env:
            raise ConfigError("--agent and --env both play the episodes", hint="set one of them")
        if self.agent.startswith(_COMMAND):
            AgentCommand(self.agent.removeprefix(_COMMAND))  # checks it
        elif self.agent and not names_code(self.agent):
            raise ConfigError(
                f"--agent {self.agent} does not name a function",
                hint=f"write MODULE:FUNCTION or FILE.py:FUNCTION, or for a command: --agent '{_COMMAND}{self.agent}'",
            )
        if not self.models:
            raise ConfigError("no model is named", hint="name one or more, such as smollm2-135m")
        if twice := next((name for name in self.models if self.models.count(name) > 1), ""):
            raise ConfigError(f"the model {twice} is named twice", hint="name each model once")
        if self.episodes > 1 and self.temperature == 0:
            raise ConfigError(
                f"{self.episodes} greedy episodes of a task are equal", hint="set --temperature above 0, such as 1.0"
            )
        check_report(self.json)

    def check_effects(self) -> None:
        """Refuse flags that other flags rule out.

        Raises:
            ConfigError: names the first of them.
        """
        if self.lists_benchmarks:
            return
        has_lm_eval, live = bool(self.lm_eval.lm_eval), self.lm_eval.live
        in_processes = bool(self.env) and not has_lm_eval
        # Reasons, each with the flags that it makes idle; a flag without effect is refused, not ignored.
        idle_groups = {
            "this command does not train": self.UNUSED,
            "lm-eval's tasks have prompts, sampling and scores of their own": _OF_EPISODES if has_lm_eval else (),
            "only lm-eval's tasks read it, and --lm-eval names none": () if has_lm_eval else _OF_LM_EVAL,
            "the engines are the live run's": ("generator",) if live else (),
            "--temperature, or lm-eval's tasks, set it": ("generator.temperature",),
            "no trainer lends devices, and no host comes or goes": gateway.RUN_FIELDS,
            "pass@k takes several episodes of a task": ("success",) if self.episodes == 1 else (),
            "no --env has processes that play episodes": () if in_processes else ("environment",),
            "--benchmark and --env have tasks of their own": () if self.sets else ("data",),
            "benchmarks have rewards of their own": ("rewards",) if self.benchmark and not self.sets else (),
        }
        check_idle(self, idle_groups, exempt=(_CONCURRENCY,) if live else ())

    @property
    def lists_benchmarks(self) -> bool:
        """Whether to only describe the benchmarks."""
        return "list" in self.benchmark

    @property
    def sets(self) -> tuple[str, ...]:
        """Task sets besides those that --benchmark and --env bring."""
        return self.tasks or (() if self.benchmark or self.env else (ONE_DIGIT_ADDITION,))

    @property
    def digest(self) -> str:
        """Short digest of everything that results depend on, except the model."""
        # Only settings that change answers count: another number of engines must still find the results.
        engines = {name: getattr(self.generator, name) for name in ("dtype", "max_tokens", "max_model_len")}
        if self.generator.quantization != "none":
            engines["quantization"] = self.generator.quantization
        # Users' rewards, environments and agents count by their code, which may have changed under the same name.
        code = code_digests(*parts_of(build_reward(self.rewards)).values())
        names = ("env", "agent", "tool_parser", "template_args")
        worlds = {name: getattr(self, name) for name in names if getattr(self, name)}
        if self.env:
            code |= code_digests(build_environment(self.env))
        if (file := code_file(self.agent.removeprefix(_COMMAND))) is not None:
            code[f"agent {file.name}"] = file_digest(file)
        parts = (self.rewards, code, self.episodes, self.temperature, self.seed, engines, worlds)
        return short_digest(json.dumps([as_json(part) for part in parts], sort_keys=True))


async def main(config: Config) -> None:
    """Evaluate each model on its unfinished tasks, or with lm-eval, and print scores and comparisons."""
    console = Console(highlight=False, markup=False)
    if config.lists_benchmarks:
        print_benchmarks(console)
        return
    is_lm_eval = bool(config.lm_eval.lm_eval)
    if not is_lm_eval and (open_to := check_isolation(config.isolation)):
        console.print(f"warning: {open_to}", style="yellow")
    sets = {} if is_lm_eval else build_sets(config)
    live, cache = config.lm_eval.live, config.cache
    folders = {name: Path(name) if live else find_model(name, cache) for name in config.models}
    # Before the digest, which covers the lengths that this may set.
    config = with_room(config, folders)
    out = config.out or Path("runs") / f"evaluate-{config.digest}"
    make_private(out, CheckpointError)
    # A folder holds results of one digest alone, so scores in it are comparable.
    check_settings(out, config.digest, as_json(config))
    package_versions, caption = versions(), "± standard error, clustered by task"
    comparisons: list[tuple[str, str, str, Comparison]] = []
    results: dict[str, Results] = {}
    with responsive_loop():
        if is_lm_eval:
            python, package_versions["lm_eval"] = await asyncio.to_thread(find_python, config.lm_eval.lm_eval_python)
            console.print(f"lm-eval {package_versions['lm_eval']}")
            models = {
                name: await _run_lm_eval(config, name, folder, out, python, console) for name, folder in folders.items()
            }
            caption = "± lm-eval's standard error"
        else:
            results = {
                name: await _evaluate(config, name, folder, sets, out, console) for name, folder in folders.items()
            }
            models = {
                name: {
                    "folder": str(folders[name]),
                    "sets": score(sets, model_results, k=config.episodes, success=config.success),
                }
                for name, model_results in results.items()
            }
            for name, model in models.items():
                if (episodes_folder := out / results_name(name, folders[name])).is_dir():
                    keep_scores(episodes_folder, model["sets"])
            comparisons = [
                (first, second, name, comparison)
                for first, second in pairs_of(config.models)
                for name, comparison in compare(sets, results[first], results[second]).items()
            ]
    short = short_names(config.models)
    print_scores(console, {short[name]: model["sets"] for name, model in models.items()}, caption)
    print_comparisons(
        console, [(short[first], short[second], name, comparison) for first, second, name, comparison in comparisons]
    )
    if config.json is not None:
        differences = [
            {"first": first, "second": second, "set": name, **vars(comparison)}
            for first, second, name, comparison in comparisons
        ]
        write_report(
            config.json,
            {"models": models, "comparisons": differences, "settings": as_json(config), "versions": package_versions},
        )
    console.print(f"prompts and answers are in {out}", soft_wrap=True)
    for model_results in results.values():
        check_scored(sets, model_results)


def build_sets(config: Config) -> dict[str, tuple[Task, ...]]:
    """Return the tasks by set name.

    Raises:
        ForgeError: a file or data set is unknown, named twice, or has no tasks for evaluation.
    """
    sources = config.data.eval_sources(config.sets, seed=config.seed, flag="--tasks", cache=config.cache)
    is_whole = not any(isinstance(source, ReasoningGymSource) for source in sources.values())
    if sources and is_whole and config.data.held_out_share is not None:
        raise ConfigError(
            "--data.held-out-share has no effect: all rows of files are evaluated, also those that a run trained on",
            hint="leave it out, and give a file of rows that were not trained on",
        )
    for text in config.benchmark:
        source = benchmark_source(text, config.cache)
        if source.name in sources:
            raise ConfigError(f"the set {source.name!r} is named twice", hint=f"name the other one TITLE={source.name}")
        sources[source.name] = source
    if not sources:
        return Mixture(sources_of(build_environment(config.env), config.seed)).eval_sets(config.evaluation.tasks)
    sets = {name: source.held_out(config.evaluation.tasks) for name, source in sources.items()}
    if empty := [name for name, tasks in sets.items() if not tasks]:
        raise ConfigError(f"--tasks {empty[0]} has no tasks for evaluation", hint="leave it out, or set others")
    may_show_tools = bool(config.env or config.agent)
    if config.tool_parser and not may_show_tools and not any(task.tools for tasks in sets.values() for task in tasks):
        raise ConfigError(
            "--tool-parser has no effect, as no task has tools, and no --env or --agent brings any",
            hint="leave it out, name an --env with tools, or give rows a column of tools",
        )
    return sets


def with_room(config: Config, folders: Mapping[str, Path]) -> Config:
    """Return settings with room for the answers of benchmarks, up to the models' context, unless flags set it."""
    benchmark_tokens = max((benchmark(text)[0].max_tokens for text in config.benchmark), default=0)
    plain, generator = Generator.Config(), config.generator
    if not benchmark_tokens or generator.max_tokens != plain.max_tokens:
        return config
    context = generator.max_model_len
    if context == plain.max_model_len:
        # One length for all models, the shortest context: otherwise answers would not be comparable.
        max_context = min(positions(read_served(folder)) for folder in folders.values())
        context = min(max_context, benchmark_tokens + _PROMPT_TOKENS)
    # At least half of the context is left to prompts.
    room = replace(generator, max_model_len=context, max_tokens=min(benchmark_tokens, max(1, context // 2)))
    return replace(config, generator=room)


def reward_of(config: Config) -> RewardFunction:
    """Build the reward: each benchmark's own, and the one of --reward for all other tasks.

    Raises:
        ConfigError: a sum of rewards, or one of whole groups, is asked for next to benchmarks.
    """
    other = build_reward(config.rewards)
    if not config.benchmark:
        return other
    if isinstance(other, WeightedSum):
        raise ConfigError(
            "--reward is a sum, next to --benchmark", hint="evaluate benchmarks in a command of their own"
        )
    benchmark_rewards: dict[str, Any] = {
        definition.name: build_reward((definition.reward,)) for definition, _, _ in map(benchmark, config.benchmark)
    }
    return RewardBySource(benchmark_rewards, other)


async def _run_lm_eval(
    config: Config, name: str, folder: Path, out: Path, python: Path, console: Console
) -> dict[str, Any]:
    """Run lm-eval's tasks on a model, with a progress bar; return its folder, scores and lm-eval's own results."""
    console.print(f"{name}: starting", soft_wrap=True)
    async with _endpoint(config, folder, out) as endpoint:
        results = out / f"{results_name(name, endpoint.folder)}-lm-eval"
        settings = await asyncio.to_thread(lm_eval_settings, config.lm_eval, endpoint, results)
        longest = settings["model_args"]["max_length"]
        console.print(f"{name}: lm-eval, with prompts of up to {longest} tokens", soft_wrap=True)
        with _progress(console) as bar:
            task = bar.add_task("lm-eval", total=None)

            def show(description: str, completed: int, total: int) -> None:
                bar.update(task, description=description, completed=completed, total=total)

            def tell(line: str) -> None:
                console.print(line, style="yellow", soft_wrap=True)

            lm_eval_results = await run_lm_eval(python, settings, endpoint.key, progress=show, tell=tell)
    return {"folder": str(endpoint.folder), "sets": scores_of(lm_eval_results), "lm_eval": lm_eval_results}


@contextlib.asynccontextmanager
async def _endpoint(config: Config, folder: Path, out: Path) -> AsyncIterator[Endpoint]:
    """Serve a model inside the context, or have a live run serve its own until the run ends."""
    if config.lm_eval.live:
        run = await asyncio.to_thread(attach, folder)
        connection = await asyncio.to_thread(run.open_gateway)
        yield Endpoint(**connection | {"folder": Path(connection["folder"])}, concurrent=config.generator.max_num_seqs)
        return
    # A new key, which only lm-eval gets.
    key = secrets.token_urlsafe(32)
    gateway_config = gateway.Config(
        model=str(folder),
        port=0,
        generator=with_longest_context(
            config.generator, folder, min_tokens=config.generator.max_tokens, max_tokens=MOST_CONTEXT
        ),
        seed=config.seed,
        cache=config.cache,
        template_args=config.template_args,
        out=out,
        isolation=config.isolation,
    )
    async with gateway.serving(gateway_config, key) as (server, generator, faults):
        with interrupted_by(faults.raise_fatal):
            yield Endpoint(
                url=server.base_url,
                key=key,
                model=server.model,
                folder=folder,
                max_model_len=generator.max_model_len,
                concurrent=config.generator.max_num_seqs * config.generator.engines,
            )


async def _evaluate(config: Config, name: str, folder: Path, sets: Sets, out: Path, console: Console) -> Results:
    """Run a model's episodes of unfinished tasks, and store the results of each finished task."""
    results = Results(out / f"{results_name(name, folder)}.jsonl", sets)
    missing = results.missing(sets)
    if not any(missing.values()):
        console.print(f"{name}: finished before, in {out}", soft_wrap=True)
        return results
    bar = _progress(console)
    episodes_folder = out / results_name(name, folder)
    keeper = EpisodeKeeper(episodes_folder, config, folder)

    def keep(set_name: str, episodes: Sequence[Episode]) -> None:
        results.add(set_name, episodes)
        keeper.add(set_name, episodes)
        bar.advance(task)

    # Each finished task is stored at once, so that an interrupted evaluation resumes there.
    evaluation = Evaluation(
        missing,
        episodes=config.episodes,
        sampling=Sampling(max_tokens=config.generator.max_tokens, temperature=config.temperature),
        version=0,
        on_task=keep,
    )
    console.print(f"{name}: starting", soft_wrap=True)
    try:
        async with _rollouts(config, folder, out) as rollouts:
            with bar:
                task = bar.add_task(name, total=sum(map(len, missing.values())))
                rollouts.start_evaluation(evaluation)
                await rollouts.finish_evaluation()
    finally:
        # Also after an interruption: what has been generated stays readable.
        await keeper.close()
    _warn_of_episodes(
        config, name, [episode for groups in keeper.episodes.values() for episode in itertools.chain(*groups)], console
    )
    console.print(f"{name}: forge-rl show {episodes_folder} lists its episodes", soft_wrap=True)
    return results


def _warn_of_episodes(config: Config, name: str, episodes: Sequence[Episode], console: Console) -> None:
    """Warn of failed episodes, and of many that were cut."""
    failures = [episode for episode in episodes if not episode.outcome.scored]
    cut = sum(episode.outcome is Outcome.TRUNCATED for episode in episodes)
    if failures:
        many = f"{len(failures)} of {len(episodes)} episodes failed; run the same command again to retry them"
        text = f"warning: {name}: {many}; {describe_failure(failures[-1])}"
        console.print(visible(text), style="yellow", soft_wrap=True)
    if cut > _OFTEN_CUT * len(episodes):
        text = (
            f"warning: {name}: {cut} of {len(episodes)} answers were cut, by --generator.max-tokens "
            f"{config.generator.max_tokens} or by the context: raise it if answers need more"
        )
        console.print(visible(text), style="yellow", soft_wrap=True)


@contextlib.asynccontextmanager
async def _rollouts(config: Config, folder: Path, out: Path) -> AsyncIterator[RolloutExecutor]:
    """Run the services for a model inside the context, which their faults interrupt."""
    async with gateway.running_services(out, config.isolation) as services:
        environment: Any = await asyncio.to_thread(build_environment, config.env)  # constructors may take long
        plays: AgentEnvironment | None = None if callable(environment) else environment
        function: Any = await asyncio.to_thread(reward_of, config) if plays is None else plays.reward
        scorer = RewardService.start(config.reward, services.start, function=function)
        # Agents get no environment from here; the service is still started, with one that costs nothing.
        factory = SingleTurn if plays is not None or config.agent else environment
        worlds = Environment.start(config.environment, services.start, factory=factory)
        # Engines, reward and environments start at the same time, as each may take minutes.
        async with task_group() as group:
            starting = group.create_task(services.engines(config.generator, folder, config.seed, config.cache))
            starting_reward = group.create_task(services.started(scorer))
            starting_worlds = group.create_task(services.started(worlds))
        generator, reward = starting.result(), starting_reward.result()
        tokenizer = Tokenizer(folder, template_args=read_template_args(config.template_args))
        if note := describe_added_stop(tokenizer):
            _warn(note)
        runner: RunEpisode
        if plays is not None or config.agent:
            backend = GeneratorBackend(generator, folder.name)
            runner = await services.stack.enter_async_context(_agents(config, plays, backend, tokenizer, reward, out))
        else:
            parser = ToolParser(config.tool_parser, tokenizer, warn=_warn)
            if config.env:
                await parser.load()
            runner = EpisodeRunner(tokenizer, starting_worlds.result(), reward, parser.parse)
        tasks = ResumableTaskStream(DataConfig().build((ONE_DIGIT_ADDITION,), seed=config.seed))  # nothing is drawn
        # Evaluation runs on the rollouts of training, for which a task stream and a scheduler are needed but never
        # asked.
        scheduler = Scheduler(ScheduleConfig(), groups=1, episodes=1, tasks=tasks)
        rollouts = RolloutExecutor(
            Dispatcher(scheduler, generator, tokenizer),
            runner,
            devices=DeviceHandover(generator),
            # Nothing is trained, so the weights stay at their first version.
            version=lambda: 0,
            seed=config.seed,
            scoring=EpisodeScoring(reward=reward),
        )
        services.stack.push_async_callback(rollouts.close)
        with interrupted_by(services.faults.raise_fatal):
            yield rollouts


@contextlib.asynccontextmanager
async def _agents(
    config: Config,
    plays: AgentEnvironment | None,
    backend: GeneratorBackend,
    tokenizer: Tokenizer,
    reward: RewardService,
    out: Path,
) -> AsyncIterator[RunEpisode]:
    """Serve the model to the agent of --agent, or of an environment that plays its own episodes, at a gateway."""
    settings, logs = GatewayConfig(tool_parser=config.tool_parser), out / "logs"
    agent: Agent | str = config.agent
    async with contextlib.AsyncExitStack() as stack:
        if plays is not None:
            await stack.enter_async_context(plays.serving(logs))
            agent = plays.agent
        elif config.agent.startswith(_COMMAND):
            agent = AgentCommand(config.agent.removeprefix(_COMMAND), settings.agent_limits)
        serving = serving_agents(agent, settings, backend, tokenizer, reward, warn=_warn, logs=logs)
        yield await stack.enter_async_context(serving)


def _warn(text: str) -> None:
    print(f"warning: {visible(text)}", file=sys.stderr, flush=True)


def _progress(console: Console) -> Progress:
    return Progress(
        *(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
        console=console,
    )


if __name__ == "__main__":
    launch(Config, main)
