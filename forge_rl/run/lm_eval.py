"""Tasks of EleutherAI's lm-evaluation-harness: it runs in a process of its own, and asks a gateway for completions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.context import check_context
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.envs.interpreter import interpreter
from forge_rl.errors import CheckpointError, ConfigError, ForgeError, check_flags
from forge_rl.folders import make_private
from forge_rl.gateway.sampling_bounds import most_scored_tokens
from forge_rl.runtime.commands import run_command
from forge_rl.services.generator import Generator
from forge_rl.terminal import visible
from forge_rl.variables import handed_on

PACKAGES = ("lm-eval[api]==0.4.13", "transformers==5.23.0")
"""What an interpreter for lm-eval has; without torch, as engines compute."""
_LEAST_VERSION = (0, 4, 10)
"""First version of lm-eval that reads its settings from a file."""
_MOST_TOKENS = 8192
"""Longest context that is chosen where the flags name none."""
_MOST_CONCURRENT = 64
_REQUEST_S = 3600
"""Longest time for one request: behind others, or while the engines of a live run are paused."""
_BAR = re.compile(r"(?:([^:|%\r]{1,60}): +)?\d+%\|[^|]*\| *(\d+)/(\d+) \[")
"""A progress line of tqdm: its title, the number that are done, and the total."""
_TELLS = re.compile(r"\S+ +(?:ERROR|CRITICAL|WARNING +\[models\.)")
"""Log lines to show: errors, and warnings of what the model was asked. Others are about the files of tasks."""
_LONGEST_LINE = 2000


@dataclass(frozen=True, kw_only=True)
class LmEvalConfig:
    """Tasks of EleutherAI's lm-evaluation-harness, lm-eval."""

    lm_eval: tuple[str, ...] = ()
    """Tasks and groups of lm-eval 0.4 to evaluate instead of --tasks, such as arc_easy gsm8k. It runs in a process of
    its own, which gets none of this environment's secrets; --pass-env HF_TOKEN lets it have one."""
    lm_eval_python: str = ""
    """Interpreter that has lm-eval: by default this one if it does, and else one that is made once, with uv."""
    include_path: Path | None = None
    """Folder with more tasks for lm-eval, as YAML files. Functions that they name run as this user."""
    limit: int | None = None
    """Documents of each of lm-eval's tasks; by default all."""
    num_fewshot: int | None = None
    """Examples before each of lm-eval's documents; by default as many as its task says."""
    chat_template: bool = False
    """Show lm-eval's prompts to the model as chats."""
    live: bool = False
    """The models are folders of runs that are going on, whose own engines answer lm-eval."""

    def __post_init__(self) -> None:
        least = {name: bound for name, bound in (("limit", 1), ("num_fewshot", 0)) if getattr(self, name) is not None}
        check_flags(self, "--", least=least)
        if self.include_path is not None and not self.include_path.is_dir():
            raise ConfigError(
                f"--include-path: there is no folder {self.include_path}", hint="name one with YAML files"
            )
        if self.live and not self.lm_eval:
            raise ConfigError(
                "--live is for --lm-eval", hint="a run evaluates other tasks itself: forge_rl.attach(FOLDER).evaluate()"
            )


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Tells where a model answers, and what lm-eval needs to know of it."""

    url: str
    """URL for OpenAI's clients, with /v1."""
    key: str
    """Key of requests."""
    model: str
    """Name of the model in requests."""
    folder: Path
    """The model's folder, for its tokenizer."""
    max_model_tokens: int
    """Most tokens of a prompt and its completion together."""
    concurrent: int
    """Requests to send at a time."""


def find_python(named: str = "") -> tuple[Path, str]:
    """Return an interpreter with lm-eval, and the version that it has; one is made where there is none.

    Args:
        named: the interpreter that the user names.

    Raises:
        ConfigError: it has no lm-eval, or one that is too old; or none can be made.
    """
    if not named and (version := _version(Path(sys.executable))):
        found = Path(sys.executable)
    else:
        found = interpreter(PACKAGES, python=named, flag="--lm-eval-python PATH")
        version = _version(found)
    install = f"install it there: {found} -m pip install '{PACKAGES[0]}' transformers; or leave out --lm-eval-python"
    if not version:
        raise ConfigError(f"{found} has no lm-eval", hint=install)
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < _LEAST_VERSION:
        least = ".".join(map(str, _LEAST_VERSION))
        raise ConfigError(f"{found} has lm-eval {version}, and {least} or later is needed", hint=install)
    return found, version


def with_longest_context(settings: Generator.Config, folder: Path) -> Generator.Config:
    """Return an engine's settings with as long a context as the model and memory allow, unless they name a length.

    lm-eval cuts longer prompts from the left, which changes scores.
    """
    if settings.max_model_tokens != DecodeSettings.max_model_tokens:
        return settings
    architecture = read_architecture(folder)
    tokens = min(_MOST_TOKENS, architecture.max_positions)
    while tokens > settings.max_new_tokens:
        longer = replace(settings, max_model_tokens=tokens)
        try:
            check_context(architecture, longer)
        except ConfigError:
            tokens //= 2
        else:
            return longer
    return settings


def lm_eval_settings(config: LmEvalConfig, endpoint: Endpoint, out: Path) -> dict[str, Any]:
    """Return the settings of lm-eval, as its --config reads them: prompts go to the endpoint as token ids.

    Args:
        out: folder for its results.
    """
    tokenizer = Tokenizer(endpoint.folder)
    # lm-eval's own `hf` model has the tokenizer add its BOS, unless the text begins with it.
    bos = tokenizer.hf.bos_token_id
    adds_bos = bos is not None and tokenizer.encode("a", add_special=True)[0] == bos
    if config.chat_template:
        adds_bos = adds_bos and tokenizer.render([{"role": "user", "content": "a"}])[0] != bos
    return {
        "model": "local-completions",
        "model_args": {
            "model": endpoint.model,
            "base_url": f"{endpoint.url}/completions",
            "tokenizer": str(endpoint.folder),
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "add_bos_token": adds_bos,
            "max_length": min(endpoint.max_model_tokens, most_scored_tokens(tokenizer.vocab_size)),
            "num_concurrent": min(endpoint.concurrent, _MOST_CONCURRENT),
            "timeout": _REQUEST_S,
        },
        "batch_size": 1,
        "tasks": list(config.lm_eval),
        "include_path": None if config.include_path is None else str(config.include_path),
        "limit": config.limit,
        "num_fewshot": config.num_fewshot,
        "apply_chat_template": config.chat_template,
        "output_path": str(out),
        "log_samples": True,
    }


async def run_lm_eval(
    python: Path,
    settings: Mapping[str, Any],
    key: str,
    *,
    progress: Callable[[str, int, int], None],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Run lm-eval to its end; cancelling ends it. Its results and lm-eval.log are in the settings' output folder.

    Args:
        python: an interpreter that has lm-eval.
        settings: of `lm_eval_settings`.
        key: of the gateway; it goes by the process's environment, as all users of a machine see command lines.
        progress: called with the title of a progress bar, the number that are done, and the total.
        tell: called with each error of its log, and each warning about requests.

    Returns:
        Its results, which also stay in that folder, with each document's prompts and answers.

    Raises:
        ForgeError: it failed; quotes the last line that it printed.
    """
    out = Path(settings["output_path"])
    make_private(out, CheckpointError)
    (out / "settings.json").write_text(json.dumps(settings, indent=2))
    log, before, rest = out / "lm-eval.log", _results(out), ""

    with log.open("wb") as file:

        def read(part: bytes) -> None:
            nonlocal rest
            file.write(part)
            file.flush()
            *lines, rest = re.split(r"[\r\n]", rest + part.decode(errors="replace"))
            rest = rest[-_LONGEST_LINE:]
            for line in lines:
                if bar := _BAR.match(line[:_LONGEST_LINE]):
                    progress(visible(bar[1] or "reading tasks"), int(bar[2]), int(bar[3]))
                elif _TELLS.match(line):
                    tell(visible(line[:_LONGEST_LINE]))

        done = await run_command(
            [str(python), "-m", "lm_eval", "run", "--config", str(out / "settings.json")],
            None,
            variables={
                "OPENAI_API_KEY": key,
                "PYTHONSAFEPATH": "1",  # else a folder here that is called datasets would be taken for the package
                "TQDM_MININTERVAL": "0.5",
                "NO_PROXY": "127.0.0.1",
            },
            given=b"",
            observe=read,
        )
    written = sorted(_results(out) - before)
    if done.problem or not written:
        problem = done.problem or "ended without results"
        raise ForgeError(f"lm-eval {visible(problem)}", hint=f"see {log}")
    found: dict[str, Any] = json.loads(written[-1].read_text())
    return found


def scores_of(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the scores of lm-eval's results by task and metric, with standard errors as METRIC_stderr.

    A metric of a filter is called METRIC (FILTER): "exact_match (strict-match)".
    """
    scores: dict[str, dict[str, float]] = {}
    for task, values in results["results"].items():
        found = scores.setdefault(task, {})
        for name, value in values.items():
            metric, _, used = name.partition(",")
            if used and isinstance(value, int | float):
                base = metric.removesuffix("_stderr")
                label = base if used == "none" else f"{base} ({used})"
                found[label + metric.removeprefix(base)] = float(value)
    return scores


def _results(out: Path) -> set[Path]:
    """Return the files of results in a folder, which are named by their time."""
    return set(out.rglob("results_*.json"))


def _version(python: Path) -> str:
    """Return the version of lm-eval that an interpreter has; "" for none."""
    asks = "import importlib.metadata as m; print(m.version('lm_eval'))"
    done = subprocess.run([str(python), "-c", asks], stdin=subprocess.DEVNULL, capture_output=True, env=handed_on())
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""
