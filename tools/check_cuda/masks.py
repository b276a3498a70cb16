"""Counts the graphs that FlexAttention and its masks need for rows of many lengths, against our limit.

python -m tools.check_cuda.masks

Beyond the limit torch.compile would run attention uncompiled, with all scores of a row in memory; `compile_once` makes
that an error. Engines on fake tensors score rows of 1 to 60 blocks, with and without gradients, in layouts that split
rows and in layouts that do not. Dynamo traces them as on a GPU; nothing is compiled.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import layouts
from benchmarks.long_row import row_of
from forge_rl.engines.protocol import TrainSettings
from tools.check_cuda.forward import fake_engine
from tools.check_cuda.report import report

BLOCKS = (1, 3, 8, 5, 12, 2, 20, 30, 40, 11, 25, 60, 4, 33)
"""Row lengths in blocks of 128 tokens."""
CASES: Sequence[tuple[str, int]] = (("qwen3", 1), ("gpt_oss", 1), ("deepseek_v3", 1), ("qwen3", 2), ("gpt_oss", 2))
"""Families, and the number of ranks that split a row. gpt-oss has sliding windows."""


def main() -> int:
    """Count graphs, and compare the maximum per function with the limit."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    max_graphs, late_graphs, failures = Counter[str](), Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        layouts.make_models(Path(folder), [family for family, _ in CASES])
        for family, ranks in CASES:
            name = f"{family}, rows over {ranks}"
            try:
                early, total = count(Path(folder) / family, ranks)
            except Exception as error:  # from any part of the stack; the other cases are still worth checking
                failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            max_graphs[name] = max(total.values())
            late_graphs[name] = total.total() - early.total()
            print(f"{name}: {dict(total)}, of these {late_graphs[name]} after half of the rows", flush=True)
            if late_graphs[name] > total.total() // 4:
                failures.append(f"{name}: rows of new lengths still take graphs: {dict(early)}, then {dict(total)}")
    limit = torch._dynamo.config.recompile_limit
    failures += [
        f"{name}: {graphs} graphs of at most {limit}" for name, graphs in max_graphs.items() if graphs > limit // 2
    ]
    return report({"limit": limit, **{f"most, {name}": graphs for name, graphs in max_graphs.items()}}, failures)


def count(folder: Path, ranks: int) -> tuple[Counter[str], Counter[str]]:
    """Count the graphs of each compiled function after half of the rows and after all."""
    graphs = Counter[str]()

    def counted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs["attention" if any("flex_attention" in str(node.target) for node in graph.graph.nodes) else "mask"] += 1
        return graph.forward

    settings = TrainSettings(seq_len=128 * max(BLOCKS), context_parallel_degree=ranks)
    rows = [row_of(128 * blocks * ranks, 43) for blocks in BLOCKS]
    with fake_engine(folder, settings, ranks, counted) as score:
        for number, row in enumerate(rows):
            if number == len(rows) // 2:
                early = graphs.copy()
            score(row)
            with torch.no_grad():
                score(row)
    return early, graphs


if __name__ == "__main__":
    sys.exit(main())
