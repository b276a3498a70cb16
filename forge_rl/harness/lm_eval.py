"""Evaluation with EleutherAI's lm-evaluation-harness, in its own process, which requests completions from a gateway."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_rl.errors import CheckpointError, ConfigError, ForgeError, check_flags
from forge_rl.metrics.step_lines import writing
from forge_rl.runtime.commands import run_command
from forge_rl.services.policy_backend import most_scored_tokens
from forge_rl.system.folders import make_private, write_whole
from forge_rl.system.interpreters import interpreter
from forge_rl.system.tasks import task_group
from forge_rl.system.terminal import visible
from forge_rl.system.variables import handed_on
from forge_rl.tokens.tokenizer import Tokenizer

PACKAGES = ("lm-eval[api]==0.4.13", "transformers==5.23.0")
"""Packages of an interpreter for lm-eval; no torch, as the engines do the computing."""
_LEAST_VERSION = (0, 4, 10)
"""First version of lm-eval that reads its settings from a file."""
MOST_CONTEXT = 8192
"""Maximum context length chosen when the flags set none."""
_MOST_CONCURRENT = 64
_REQUEST_S = 3600
"""Timeout of one request, including time queued or while the engines of a live run are paused."""
_BAR = re.compile(r"(?:([^:|%\r]{1,60}): +)?\d+%\|[^|]*\| *(\d+)/(\d+) \[")
"""A tqdm progress line: title, number done, and total."""
_TELLS = re.compile(r"\S+ +(?:ERROR|CRITICAL|WARNING +\[models\.)")
"""Log lines to show: errors, and warnings about requests to the model. Other warnings are about task files."""
_LONGEST_LINE = 2000
_VERSION_S = 120.0
"""Maximum time for an interpreter to name its lm-eval."""


@dataclass(frozen=True, kw_only=True)
class LmEvalConfig:
    """Tasks of EleutherAI's lm-evaluation-harness, lm-eval."""

    lm_eval: tuple[str, ...] = ()
    """Tasks and groups of lm-eval 0.4 to evaluate instead of --tasks, such as arc_easy gsm8k. It runs in its own
    process without this environment's secrets; --pass-env HF_TOKEN passes one on."""
    lm_eval_python: str = ""
    """Python interpreter with lm-eval: by default this one if it has lm-eval, otherwise one created once with uv."""
    include_path: Path | None = None
    """Folder with additional lm-eval tasks as YAML files. Functions that they name run as this user."""
    limit: int | None = None
    """Number of documents per lm-eval task; by default all."""
    num_fewshot: int | None = None
    """Number of few-shot examples before each lm-eval document; by default the task's own."""
    chat_template: bool = False
    """Format lm-eval's prompts with the chat template."""
    live: bool = False
    """The models are folders of live runs, whose own engines serve lm-eval."""

    def __post_init__(self) -> None:
        minimums = {
            name: bound for name, bound in (("limit", 1), ("num_fewshot", 0)) if getattr(self, name) is not None
        }
        check_flags(self, "--", minimum=minimums)
        if self.include_path is not None and not self.include_path.is_dir():
            raise ConfigError(
                f"--include-path: {self.include_path} is not a folder", hint="give a folder with YAML files"
            )
        if self.live and not self.lm_eval:
            raise ConfigError(
                "--live requires --lm-eval",
                hint="a run evaluates other tasks itself: forge_rl.attach(FOLDER).evaluate()",
            )


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Endpoint of a model, and what lm-eval needs to know about it."""

    url: str
    """Base URL for OpenAI clients, including /v1."""
    key: str
    """API key."""
    model: str
    """Name of the model in requests."""
    folder: Path
    """The model's folder, for its tokenizer."""
    max_model_len: int
    """Maximum tokens of a prompt and its completion together."""
    concurrent: int
    """Maximum number of concurrent requests."""


def find_python(path: str = "") -> tuple[Path, str]:
    """Return an interpreter with lm-eval and its lm-eval version; create one if there is none.

    Args:
        path: interpreter chosen by the user.

    Raises:
        ConfigError: its lm-eval is missing or too old, it does not answer, or no interpreter can be created.
    """
    # This interpreter if it has lm-eval; creating another one takes minutes and the network.
    if not path and (version := _version(Path(sys.executable))):
        python = Path(sys.executable)
    else:
        python = interpreter(PACKAGES, python=path, flag="--lm-eval-python PATH")
        version = _version(python)
    install = f"install it there: {python} -m pip install '{PACKAGES[0]}' transformers; or leave out --lm-eval-python"
    if not version:
        raise ConfigError(f"{python} has no lm-eval", hint=install)
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < _LEAST_VERSION:
        min_version = ".".join(map(str, _LEAST_VERSION))
        raise ConfigError(f"{python} has lm-eval {version}, but {min_version} or later is required", hint=install)
    return python, version


def lm_eval_settings(config: LmEvalConfig, endpoint: Endpoint, out: Path) -> dict[str, Any]:
    """Return lm-eval's settings for its --config; prompts are sent to the endpoint as token ids.

    Args:
        out: folder for the results.
    """
    tokenizer = Tokenizer(endpoint.folder)
    # Like lm-eval's `hf` model: the tokenizer adds its BOS unless the text begins with it.
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
            # Token ids, so that engines score exactly the tokens that lm-eval counts.
            "tokenized_requests": True,
            "add_bos_token": adds_bos,
            "max_length": min(endpoint.max_model_len, most_scored_tokens(tokenizer.vocab_size)),
            "num_concurrent": min(endpoint.concurrent, _MOST_CONCURRENT),
            "timeout": _REQUEST_S,
        },
        # Engines batch what arrives; num_concurrent says how much of it arrives at a time.
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
    """Run lm-eval until it finishes; cancelling kills it. Results and lm-eval.log are in the settings' output folder.

    Args:
        python: an interpreter that has lm-eval.
        settings: result of `lm_eval_settings`.
        key: the gateway's API key; passed in the environment, as command lines are visible to all users of the machine.
        progress: called with a progress bar's title, number done, and total.
        tell: called with each error and each warning about requests in the log.

    Returns:
        The results, which also stay in that folder, with the prompts and answers of each document.

    Raises:
        CheckpointError: settings or log cannot be written.
        ForgeError: lm-eval failed; quotes its last line of output.
    """
    out = Path(settings["output_path"])
    make_private(out, CheckpointError, hint="free space there, or choose another --out")
    with writing(out / "settings.json"):
        write_whole(out / "settings.json", json.dumps(settings, indent=2))
    # Earlier results in the folder must not pass for this run's.
    log, old_results, rest = out / "lm-eval.log", _results(out), ""

    with writing(log), log.open("wb") as file:

        def read(part: bytes) -> None:
            nonlocal rest
            file.write(part)
            file.flush()
            # Progress bars end with a carriage return; the last part may be an incomplete line.
            *lines, rest = re.split(r"[\r\n]", rest + part.decode(errors="replace"))
            rest = rest[-_LONGEST_LINE:]
            for line in lines:
                if bar := _BAR.match(line[:_LONGEST_LINE]):
                    progress(visible(bar[1] or "reading tasks"), int(bar[2]), int(bar[3]))
                elif _TELLS.match(line):
                    tell(visible(line[:_LONGEST_LINE]))

        command = run_command(
            [str(python), "-m", "lm_eval", "run", "--config", str(out / "settings.json")],
            None,
            variables={
                "OPENAI_API_KEY": key,
                "PYTHONSAFEPATH": "1",  # else a local folder called datasets would shadow the package
                "TQDM_MININTERVAL": "0.5",
                "NO_PROXY": "127.0.0.1",
            },
            stdin=b"",
            observe=read,
        )
        # In a group, as an error of `read` comes in a group of the command's tasks.
        async with task_group() as group:
            running = group.create_task(command)
    process = running.result()
    new_results = sorted(_results(out) - old_results)
    if process.problem or not new_results:
        problem = process.problem or "ended without results"
        raise ForgeError(f"lm-eval {visible(problem)}", hint=f"see {log}")
    results: dict[str, Any] = json.loads(new_results[-1].read_text())
    return results


def scores_of(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return lm-eval's scores by task and metric, with standard errors as METRIC_stderr.

    A filtered metric is called METRIC (FILTER), such as "exact_match (strict-match)".
    """
    scores: dict[str, dict[str, float]] = {}
    for task, values in results["results"].items():
        task_scores = scores.setdefault(task, {})
        for name, value in values.items():
            # Scores are named METRIC,FILTER; entries without a filter, such as alias, are not scores.
            metric, _, filter_name = name.partition(",")
            if filter_name and isinstance(value, int | float):
                base = metric.removesuffix("_stderr")
                label = base if filter_name == "none" else f"{base} ({filter_name})"
                task_scores[label + metric.removeprefix(base)] = float(value)
    return scores


def _results(out: Path) -> set[Path]:
    """Return the result files in a folder, which are named by their time."""
    return set(out.rglob("results_*.json"))


def _version(python: Path) -> str:
    """Return an interpreter's lm-eval version; "" if it has none.

    Raises:
        ConfigError: it cannot be executed, or does not answer in time.
    """
    script = "import importlib.metadata as m; print(m.version('lm_eval'))"
    command = [str(python), "-c", script]
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=handed_on(), timeout=_VERSION_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        cause = error.strerror if isinstance(error, OSError) else f"no answer within {_VERSION_S:g} s"
        raise ConfigError(
            f"{python} cannot say whether it has lm-eval: {cause}", hint="name another one: --lm-eval-python PATH"
        ) from error
    return process.stdout.decode(errors="replace").strip() if process.returncode == 0 else ""
