"""The `tools` environment: a calculator, and search if a corpus is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forge_rl.envs.calculator import calculator
from forge_rl.envs.compaction import DropOldOutputs
from forge_rl.envs.search import Corpus
from forge_rl.envs.tools import ToolEnv


def tools(
    *,
    corpus: str = "",
    results: int = 3,
    max_turns: int = 8,
    timeout_s: float = 30.0,
    instruction: str = "",
    compact_above_chars: int = 0,
    cache: str = "~/.cache/forge_rl/corpora",
) -> ToolEnv:
    """Make the environment for `--env tools:corpus=notes.jsonl,results=3,max_turns=6`.

    Args:
        corpus: texts to search, see `Corpus.open`; without it, the calculator is the only tool.
        results: maximum texts that a search returns.
        max_turns: maximum completions per episode; an episode whose last completion calls tools has no answer.
        timeout_s: timeout of one tool call.
        instruction: system message for tasks that have none.
        compact_above_chars: number of characters above which a conversation loses all outputs but the last; 0 keeps
            them, and the episode ends when the context is full.
        cache: folder of the corpora's indexes.

    Raises:
        ConfigError: the corpus does not exist or cannot be read.
    """
    functions: list[Callable[..., object]] = [calculator]
    if corpus:
        functions.append(Corpus.open(Path(corpus), Path(cache).expanduser()).tool(results=results))
    return ToolEnv(
        tuple(functions),
        max_turns=max_turns,
        timeout_s=timeout_s,
        instruction=instruction,
        compact=DropOldOutputs(above_chars=compact_above_chars) if compact_above_chars else None,
    )
