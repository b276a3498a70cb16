"""Show tasks as the model will see them, with truth, lengths, duplicates and held-out tasks; starts no engine.

For conversations and pairs, as recipes.sft and recipes.dpo take them, it shows which tokens are trained.

python -m apps.data data/train.jsonl:question=problem,answer=solution chain_sum*0.3
python -m apps.data --env game --play hand

The second shows what an environment shows the model first, and lets you, or a model, play an episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import tyro
from rich.console import Console
from rich.text import Text

from forge_rl.data.data_config import DataConfig, TaskTexts
from forge_rl.data.examples import conversation_episodes, preference_episodes
from forge_rl.data.mixture import Mixture
from forge_rl.data.preview import MeasuredTasks, example_panel, guess_kind, histogram, measure, task_panel
from forge_rl.data.scan import Lengths, PromptLengths, Scan, check_tasks
from forge_rl.data.sources.rows import Kind
from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.play import Answer, play, typed
from forge_rl.envs.protocol import Observation, Parsed, Step
from forge_rl.errors import ConfigError, ForgeError, check_flags, check_installed
from forge_rl.flags.fields import check_idle
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.rollout.evaluation import EvalTasks
from forge_rl.rollout.examples import ExampleFn, ExampleLengths, ExampleMaker
from forge_rl.run.launch import launch
from forge_rl.run.records.json_files import check_report, write_report
from forge_rl.system.redaction import without_credentials
from forge_rl.system.terminal import visible
from forge_rl.system.variables import api_key
from forge_rl.tokens.template_args import TemplateArgTexts, read_template_args
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Message, Task, ToolCall

_BAR = 40
_OF_DATA = ("eval_tasks", "trainer", "rows", "groups_per_batch", "evaluation", "sample", "json")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Length limits, with a recipe's names and defaults."""

    max_model_len: int = 1024
    """Maximum tokens of a prompt and its completion together."""
    max_tokens: int = 16
    """Maximum tokens of one completion."""


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """Length limit of conversations and pairs, with a recipe's name and default on CPUs."""

    seq_len: int = 1024
    """Maximum tokens of a conversation, or of an answer of a pair with its prompt."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Show the prompts that a model will see, and the truth that scores its answers. Flags match the recipes'."""

    named: tyro.conf.Positional[tuple[str, ...]] = ()
    """The mixture, as in --tasks."""
    tasks: TaskTexts = ()
    eval_tasks: tuple[str, ...] = ()
    """Tasks for evaluation only, as [NAME=]TASKS; by default a share of the tasks is held out."""
    data: DataConfig = field(default_factory=DataConfig)
    model: str = "smollm2-135m"
    """Name of a bundled model, Hugging Face id, or folder of a model or a checkpoint: its tokenizer and its chat
    template are used."""
    generator: Limits = field(default_factory=Limits)
    trainer: RowLimits = field(default_factory=RowLimits)
    rows: Literal["auto", "prompt", "conversation", "pair"] = "auto"
    """What rows are: prompts to answer; conversations with their answers, for recipes.sft; or pairs of answers, for
    recipes.dpo and recipes.reward_model. By default, one row of each source tells."""
    groups_per_batch: int = 8
    """Number of tasks per batch."""
    evaluation: EvalTasks = field(default_factory=EvalTasks)
    seed: int = 0
    """Seed of the tasks' order."""
    show: int = 2
    """Number of tasks to show per source."""
    env: str = ""
    """Environment whose first observation to show, as in training; its own tasks, if none are named."""
    play: Literal["no", "hand", "model"] = "no"
    """Play the first task in the environment: by hand, a line of stdin for each turn (NAME {"key": "value"} calls a
    tool, a backslash at the end continues the line), or by a model, --url or else --model in an engine."""
    url: str = ""
    """With --play model: an OpenAI-compatible endpoint, up to and including /v1."""
    url_model: str = "default"
    """Name of the model in requests to --url."""
    url_key_env: str = ""
    """Environment variable with the API key of --url."""
    turns: int = 10
    """Maximum turns to play."""
    sample: int = 1000
    """Number of tasks per source whose prompts are measured."""
    template_args: TemplateArgTexts = ()
    parse_control_tokens: bool = False
    """Encode text in messages that looks like a control token as that token."""
    json: Path | None = None
    """JSON file for the results."""
    cache: Path = field(default_factory=default_cache)
    """Folder for bundled models, which are built on first use, and for scan results of large files."""

    @property
    def prompt_limit(self) -> int:
        """Maximum tokens of a prompt."""
        return self.generator.max_model_len - self.generator.max_tokens

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"show": 0, "sample": 1, "groups_per_batch": 1, "turns": 1})
        check_report(self.json)
        if self.play != "no" and not self.env:
            raise ConfigError(f"--play {self.play} has no environment to play", hint="set --env, such as --env game")
        if self.url and not _is_address(self.url):
            raise ConfigError(
                f"--url {without_credentials(self.url)!r} is not the address of a server",
                hint="write http://HOST:PORT/v1, or https://HOST/v1",
            )
        if self.prompt_limit <= 0:
            raise ConfigError(
                f"--generator.max-model-len is {self.generator.max_model_len}",
                hint="set it above --generator.max-tokens",
            )
        if self.json is not None and not self.json.parent.is_dir():
            raise ConfigError(f"--json: the folder {self.json.parent} does not exist", hint="create it, or set another")

    def check_effects(self) -> None:
        """Refuse flags that other flags rule out.

        Raises:
            ConfigError: names the first of them.
        """
        idle_groups = {
            "--play no plays nothing": ("turns",) if self.play == "no" else (),
            "only --play model asks a model": () if self.play == "model" else ("url",),
            "no --url is set": () if self.url else ("url_model", "url_key_env"),
            "--env shows an environment, not the data": _OF_DATA if self.env else (),
        }
        check_idle(self, idle_groups)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and has_port and url.isprintable()


async def main(config: Config) -> None:
    """Show the tasks, or an environment."""
    console = Console(highlight=False)
    if config.env:
        await show_environment(config, console)
    else:
        await asyncio.to_thread(show, config, console)


async def show_environment(config: Config, console: Console) -> None:
    """Show what an environment shows first for some tasks, and play the first task if --play says who.

    Raises:
        ForgeError: no tasks are named, or the environment or the endpoint fails.
    """
    factory: Any = build_environment(config.env)
    if not callable(factory):
        raise ConfigError(
            f"--env {config.env} plays its own episodes", hint="look at some with python -m apps.evaluate --env"
        )
    source_texts = (*config.named, *config.tasks)
    mixture = (
        config.data.build(source_texts, seed=config.seed, cache=config.cache)
        if source_texts
        else Mixture(sources_of(factory, config.seed))
    )
    folder = await asyncio.to_thread(resolve_model, config.model, config.cache)
    tokenizer = _tokenizer(config, folder)
    tasks = [task for name in mixture for task in (mixture.draw_from(name) for _ in range(max(1, config.show)))]
    for task in tasks[: 1 if config.play != "no" else None]:
        console.rule(Text(visible(f"{config.env}, {task.source} {task.id}"), style="bold"), align="left")
        tell = functools.partial(_tell, console, tokenizer, task)
        async with _player(config, folder) as player:
            if player is not None and config.play == "model":
                player = functools.partial(_saying, console, player)
            total = await play(factory, task, player, tell, turns=config.turns)
        if config.play != "no":
            console.print(f"reward: {'none, the task is scored by --reward' if total is None else f'{total:g}'}")


@contextlib.asynccontextmanager
async def _player(config: Config, folder: Path) -> AsyncIterator[Answer | None]:
    """Yield the player: nobody, the person at stdin, or a model."""
    if config.play == "no":
        yield None
    elif config.play == "hand":
        yield _ask
    elif config.url:
        check_installed("--url", "openai", "judge")
        key = api_key("--url", config.url_key_env, option="--url-key-env")
        yield functools.partial(_request, config.url, config.url_model, key or "none", config.generator.max_tokens)
    else:
        from forge_rl.runtime.processes import responsive_loop  # these load Monarch and torch
        from forge_rl.services.generator import Generator
        from forge_rl.system.tasks import interrupted_by

        from . import gateway

        check_installed("--play model", "openai", "judge")
        # A gateway of its own, with a key that nobody else has, serves the model to the player.
        key = secrets.token_urlsafe(32)
        limits = Generator.Config(**vars(config.generator))
        with tempfile.TemporaryDirectory(prefix="play-") as out, responsive_loop():
            gateway_config = gateway.Config(
                model=str(folder),
                port=0,
                generator=limits,
                template_args=config.template_args,
                parse_control_tokens=config.parse_control_tokens,
                cache=config.cache,
                out=Path(out),
            )
            async with gateway.serving(gateway_config, key) as (server, _, faults):
                with interrupted_by(faults.raise_fatal):
                    yield functools.partial(_request, server.base_url, server.model, key, limits.max_tokens)


async def _saying(
    console: Console, player: Answer, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
) -> Parsed | None:
    """Ask a player, and print its answer."""
    if (answer := await player(messages, tools)) is not None:
        content, calls = answer
        text = "\n".join(filter(None, (content, *(f"{call.name} {call.arguments}" for call in calls))))
        console.print(Text(visible(f"model: {text}"), style="green"))
    return answer


async def _ask(messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> Parsed | None:
    """Read an answer from stdin; None at its end."""
    print("> ", end="", flush=True)
    lines = [await asyncio.to_thread(sys.stdin.readline)]
    while lines[-1].endswith("\\\n"):
        lines.append(await asyncio.to_thread(sys.stdin.readline))
    if not lines[0]:
        return None
    return typed("\n".join(line.rstrip("\n").removesuffix("\\") for line in lines), tools)


async def _request(
    url: str,
    model: str,
    key: str,
    max_tokens: int,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
) -> Parsed:
    """Ask an OpenAI-compatible endpoint.

    Raises:
        ForgeError: it does not answer, or refuses.
    """
    import openai

    options: dict[str, Any] = {"tools": list(tools)} if tools else {}
    try:
        async with openai.AsyncOpenAI(base_url=url, api_key=key, timeout=600) as client:
            completion = await client.chat.completions.create(
                model=model,
                messages=list(messages),  # type: ignore[arg-type]
                max_tokens=max_tokens,
                **options,
            )
        # The client passes replies of any shape on, such as the text of a web page.
        message = completion.choices[0].message
        calls = tuple(
            ToolCall(id=str(call.id), name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
            if call.type == "function"
        )
        content = message.content or ""
        if not all(isinstance(text, str) for text in (content, *(call.name + call.arguments for call in calls))):
            raise TypeError("its content is not text")
    except (openai.OpenAIError, AttributeError, IndexError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ForgeError(
            f"{without_credentials(url)} did not answer with a completion: {reason:.300}",
            hint="check --url, which ends in /v1 for most servers",
        ) from error
    return content, calls


def _tell(console: Console, tokenizer: Tokenizer, task: Task, event: Observation | Step) -> None:
    """Print what the environment showed."""
    if isinstance(event, Observation):
        console.print(
            task_panel(tokenizer, replace(task, messages=event.messages, tools=event.tools or task.tools), "shown")
        )
        return
    for call in event.calls:
        console.print(Text(visible(f"call {call.name}({call.arguments:.500}) {call.error:.500}"), style="dim"))
    # A history replaces all messages so far; otherwise only the new ones are shown.
    for message in event.history or event.messages:
        console.print(Text(visible(f"{message.get('role', '')}: {message.get('content', '')}"), style="yellow"))
    parts = "".join(f", {name} {value:g}" for name, value in event.parts.items())
    reward = "" if event.reward is None else f"reward {event.reward:g}{parts}"
    end_text = "the episode is over" if event.done else ""
    if text := "; ".join(filter(None, (reward, end_text))):
        console.print(Text(visible(text), style="dim"))


def show(config: Config, console: Console) -> None:
    """Read the tasks and print them; see `Config`."""
    # Progress goes to stderr, so that stdout can be redirected.
    with Console(stderr=True).status("reading") as status:

        def progress(label: str, fraction: float) -> None:
            status.update(f"{label} {fraction:.0%}")

        texts = (*config.named, *config.tasks)
        kind = (
            guess_kind(config.data, texts, seed=config.seed, cache=config.cache)
            if config.rows == "auto"
            else config.rows
        )
        mixture = config.data.build(
            texts, seed=config.seed, eval_tasks=config.eval_tasks, kind=kind, cache=config.cache
        )
        status.update("loading the tokenizer")
        folder = resolve_model(config.model, config.cache, progress)
        tokenizer = _tokenizer(config, folder)
        maker = _maker(config, kind, tokenizer)
        lengths = ExampleLengths(maker) if maker is not None else PromptLengths(tokenizer, config.prompt_limit)
        scans = check_tasks(mixture, lambda: lengths, cache=config.cache, progress=progress)
        source_reports: dict[str, object] = {}
        parts = []
        for name in mixture:
            status.update(f"measuring {name}")
            tasks = _sample(mixture, name, scans.get(name), config.sample)
            measurement = measure(lengths, tasks)
            parts.append((name, measurement))
            source_reports[name] = _as_json(mixture, name, scans.get(name), measurement, config.groups_per_batch)
        sets = mixture.eval_sets(config.evaluation.tasks)
    for name, measurement in parts:
        _show_source(console, config, mixture, name, scans.get(name), lengths, measurement)
        for number, (task, length) in enumerate(
            zip(measurement.tasks[: config.show], measurement.lengths, strict=False), 1
        ):
            title = f"{name}, task {number}: {length} tokens"
            console.print(
                task_panel(tokenizer, task, title)
                if maker is None
                else example_panel(maker.tokenizer, task, maker.any_length(task).episodes, title)
            )
        console.print()
    _show_sets(console, sets, scans, lengths)
    if config.json is not None:
        eval_counts = {name: len(tasks) for name, tasks in sets.items()}
        write_report(config.json, {"rows": kind, "sources": source_reports, "evaluation": eval_counts})


def _maker(config: Config, kind: Kind, tokenizer: Tokenizer) -> ExampleMaker | None:
    """Return the maker of the examples that recipes train on; None if rows are prompts."""
    makers: dict[Kind, ExampleFn] = {"conversation": conversation_episodes, "pair": preference_episodes}
    return ExampleMaker(makers[kind], tokenizer, longest=config.trainer.seq_len) if kind in makers else None


def _tokenizer(config: Config, folder: Path) -> Tokenizer:
    args = read_template_args(config.template_args)
    return Tokenizer(folder, parse_control_tokens=config.parse_control_tokens, template_args=args)


def _show_source(
    console: Console,
    config: Config,
    mixture: Mixture,
    name: str,
    scan: Scan | None,
    limits: Lengths,
    measurement: MeasuredTasks,
) -> None:
    tasks, lengths, limit = measurement.tasks, measurement.lengths, limits.limit
    console.rule(Text(f"{name}  {mixture.shares[name]:.0%} of the mixture", style="bold"), align="left")
    console.print(
        Text(visible(scan.describe(limit, limits.measured) if scan is not None else "generated, without end"))
    )
    if scan is not None:
        batches = scan.trained / max(1e-9, config.groups_per_batch * mixture.shares[name])
        console.print(
            f"an epoch of {scan.trained:,} tasks is {batches:,.1f} batches of {config.groups_per_batch} tasks"
        )
    tools = len({tool_name for task in tasks for tool_name in map(str, task.tools)})
    unit = "prompts" if isinstance(limits, PromptLengths) else "examples"
    console.print(
        f"{unit} of {len(tasks):,} tasks: {min(lengths):,} to {max(lengths):,} tokens, median "
        f"{statistics.median(lengths):,.0f}, room for {limit:,}" + (f"; {tools} tools" if tools else "")
    )
    if max(lengths) > limit:
        num_too_long = sum(length > limit for length in lengths)
        console.print(f"{num_too_long} of them are longer than {limit:,} tokens and will be skipped", style="yellow")
    if measurement.refused:
        warning = f"{len(measurement.refused):,} cannot be trained on, the first: {measurement.refused[0]}"
        console.print(Text(visible(warning), style="yellow"))
    # The description of a scan, shown above, has its note already.
    if measurement.note and scan is None:
        console.print(Text(measurement.note))
    for line in histogram(lengths, min(_BAR, max(10, console.width - 40))):
        console.print(f"  {line}", soft_wrap=True)


def _show_sets(console: Console, sets: dict[str, tuple[Task, ...]], scans: dict[str, Scan], lengths: Lengths) -> None:
    console.rule(Text("evaluation", style="bold"), align="left")
    for name, tasks in sets.items():
        scan = scans.get(f"evaluation {name}")
        scan_text = f" ({scan.describe(lengths.limit, lengths.measured)})" if scan is not None else ""
        console.print(Text(visible(f"{name}: {len(tasks):,} tasks{scan_text}")))


def _sample(mixture: Mixture, name: str, scan: Scan | None, count: int) -> list[Task]:
    return [mixture.draw_from(name) for _ in range(min(count, scan.trained) if scan is not None else count)]


def _as_json(
    mixture: Mixture, name: str, scan: Scan | None, measurement: MeasuredTasks, groups: int
) -> dict[str, object]:
    lengths = measurement.lengths
    report: dict[str, object] = {
        "share": mixture.shares[name],
        "prompt_tokens": {"least": min(lengths), "median": statistics.median(lengths), "most": max(lengths)},
        "refused": len(measurement.refused),
    }
    if scan is not None:
        report |= {
            "rows": scan.rows,
            "trained": scan.trained,
            "held_out": scan.held_out,
            "bad": scan.bad,
            "duplicates": scan.duplicates,
            "too_long": len(scan.too_long),
            "batches_per_epoch": scan.trained / max(1e-9, groups * mixture.shares[name]),
        }
    return report


if __name__ == "__main__":
    launch(Config, main, shows_only=True)
