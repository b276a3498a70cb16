"""One update on a long row, in its own process; prints its memory as JSON. Part of `long_rows`.

python -m benchmarks.long_row MODEL before|none|selective|full TOKENS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Literal, cast

import torch

from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.factory import make_train_engine
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.platform import init_distributed
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.engines.titan import cpu_attention
from forge_rl.engines.titan import head as titan_head
from forge_rl.packing.rows import Minibatch, Row

_FEW_TOKENS = 64


def row_of(tokens: int, vocab: int) -> Row:
    """Make a row filled by one episode with this many tokens; all except the first are trained."""
    zeros = torch.full((tokens,), 0, dtype=torch.int32)
    token_ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    return Row(
        token_ids=token_ids,
        positions=torch.arange(tokens),
        trees=zeros,
        until=zeros + tokens,
        targets=token_ids.roll(-1),
        mask=torch.ones(tokens, dtype=torch.bool),
        behaviour=torch.full((tokens,), -10.0),
        advantages=torch.ones(tokens),
        versions=zeros,
        episodes=zeros,
        segments=zeros,
        turns=zeros,
        lengths=zeros + tokens,
        observed=torch.zeros(tokens, dtype=torch.bool),
    )


def as_before() -> None:
    """Disable chunking in scoring and attention: all logits at once, and SDPA with a dense mask."""
    dense: dict[int, torch.Tensor] = {}

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: object, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.shape[2] not in dense:
            dense[q.shape[2]] = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        attended = torch.nn.functional.scaled_dot_product_attention
        return attended(q, k, v, attn_mask=dense[q.shape[2]], scale=scale), q.new_empty(q.shape[:3])

    titan_head.HEAD_CHUNK_BYTES = 1 << 62
    cpu_attention.attend_trees = attend


def main() -> None:
    """Take two updates, the second on the long row, once all persistent state is allocated."""
    model, mode, tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if mode == "before":
        as_before()
    init_distributed(0, 1, "127.0.0.1", 0)
    checkpointing = cast(Literal["none", "selective", "full"], "none" if mode == "before" else mode)
    settings = TrainSettings(
        dtype="float32",
        seq_len=tokens,
        activation_checkpointing=checkpointing,
        optimizer=OptimizerConfig(lr=1e-5),
    )
    engine = make_train_engine(model, settings)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    few, many = row_of(_FEW_TOKENS, vocab), row_of(tokens, vocab)

    def update(*rows: Row) -> None:
        minibatch = Minibatch(rows=rows, tokens=sum(len(row) for row in rows), sequences=len(rows))
        metrics = engine.train_batch([minibatch], StepRequest(loss=ClippedSurrogate(), total_updates=4)).metrics
        assert metrics[0] is not None, "its gradient is not finite"

    update(few)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    began = time.monotonic()
    update(few, many)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    print(json.dumps({"peak": peak, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
