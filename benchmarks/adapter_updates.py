"""Updates of adapters in a process of their own: peak memory, and time compared with transformers and peft."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.memory import private_bytes, sampled_peak
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.adapter_settings import AdamStep, AdapterSettings
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.lora_config import LoRAConfig, linear_modules
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, Minibatch
from forge_rl.types import Batch, Episode, Group, Task, Turn
from forge_rl.weights.manifest import draft

_SEQ_LEN = 512
_LR, _CLIP, _MAX_NORM = 1e-4, 0.2, 1.0


def drawn_batch(vocab: int, *, groups: int, group_size: int, prompt: int, answer: int, seed: int = 0) -> Batch:
    """Draw groups of episodes that share their prompt."""
    drawn = np.random.default_rng(seed)
    laid_groups = []
    for number in range(groups):
        task = Task(id=str(number), source="random", messages=({"role": "user", "content": "go"},))
        prompt_ids = drawn.integers(3, vocab, prompt, dtype=np.int32)
        turns = [
            Turn(
                prompt_ids=prompt_ids,
                token_ids=drawn.integers(3, vocab, answer, dtype=np.int32),
                logprobs=np.full(answer, -10.0),
                versions=np.zeros(answer, np.int32),
                text="",
            )
            for _ in range(group_size)
        ]
        laid_groups.append(Group(task=task, episodes=tuple(Episode(task=task, turns=(turn,)) for turn in turns)))
    return Batch(groups=tuple(laid_groups), version=0)


def advantages_of(batch: Batch) -> torch.Tensor:
    """Return advantages of alternating sign, [P, G]."""
    size = len(batch.groups[0].episodes)
    return torch.tensor([[(-1.0) ** index for index in range(size)] for _ in batch.groups])


def _minibatch(batch: Batch) -> Minibatch:
    (minibatch,) = pack(batch, advantages_of(batch), Layout(seq_len=_SEQ_LEN), drop_uniform=False).minibatches
    return minibatch


def _engine(folder: Path, lora: LoRAConfig) -> Any:
    from forge_rl.engines.titan.train import TitanEngine

    optimizer = OptimizerConfig(lr=_LR, max_grad_norm=_MAX_NORM)
    return TitanEngine(folder, TrainSettings(lora=lora, seq_len=_SEQ_LEN, dtype="float32", optimizer=optimizer))


def update_peak(rank: int, folder: Path, lora: LoRAConfig, shape: dict[str, int]) -> int:
    """Return the most memory in bytes that three updates take, with the model and without the process's own."""
    batch = drawn_batch(read_architecture(folder).vocab, **shape)
    before = private_bytes()
    with sampled_peak(private_bytes, 0.01) as peak:
        engine = _engine(folder, lora)
        for _ in range(3):
            engine.train_batch([_minibatch(batch)], StepRequest(loss=ClippedSurrogate(), total_updates=9, version=0))
    return peak[0] - before


def adapters_peak(rank: int, folder: Path, lora: LoRAConfig, shape: dict[str, int], count: int) -> int:
    """Return the same of so many adapters over one base, each with three updates."""
    from forge_rl.engines.titan.adapter_engine import TitanAdapters

    batch = drawn_batch(read_architecture(folder).vocab, **shape)
    before = private_bytes()
    with sampled_peak(private_bytes, 0.01) as peak:
        adapters = TitanAdapters(_engine(folder, lora), folder)
        for number in range(count):
            adapters.open(str(number), AdapterSettings(lora=lora, seed=number))
        for number in list(range(count)) * 3:
            adapters.run(str(number), _minibatch(batch), ClippedSurrogate())
            adapters.step(str(number), AdamStep(lr=_LR))
    return peak[0] - before


def adapters_seconds(
    rank: int, folder: Path, lora: LoRAConfig, shape: dict[str, int], count: int, repeats: int
) -> list[tuple[float, float]]:
    """Time an update of each of several adapters, and as many updates of one, in turn; after a warm-up."""
    from forge_rl.engines.titan.adapter_engine import TitanAdapters

    vocab = read_architecture(folder).vocab
    minibatches = [_minibatch(drawn_batch(vocab, **shape, seed=seed)) for seed in range(count)]
    adapters = TitanAdapters(_engine(folder, lora), folder)
    for number in range(count):
        adapters.open(str(number), AdapterSettings(lora=lora, seed=number))

    def update(names: list[str]) -> float:
        began = time.perf_counter()
        for name, minibatch in zip(names, minibatches, strict=True):
            adapters.run(name, minibatch, ClippedSurrogate())
            adapters.step(name, AdamStep(lr=_LR))
        return time.perf_counter() - began

    names = [str(number) for number in range(count)]
    # In turn, so that other load on the machine slows both; the first pair warms up.
    pairs = [(update(names), update(["0"] * count)) for _ in range(repeats + 1)]
    return pairs[1:]


def update_seconds(
    rank: int, folder: Path, lora: LoRAConfig, shape: dict[str, int], repeats: int
) -> list[tuple[float, float]]:
    """Time updates by forge_rl and by transformers with peft on the same episodes, in turn; after a warm-up."""
    batch = drawn_batch(read_architecture(folder).vocab, **shape)
    engine, peer = _engine(folder, lora), _peft_update(folder, lora, batch)
    request = StepRequest(loss=ClippedSurrogate(), total_updates=repeats + 1, version=0)

    def ours() -> None:
        engine.train_batch([_minibatch(batch)], request)

    return [(_seconds(ours), _seconds(peer)) for _ in range(repeats + 1)][1:]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _peft_update(folder: Path, lora: LoRAConfig, batch: Batch) -> Callable[[], None]:
    """Return an update as trainers on transformers and peft take it: episodes as rows, logits of answers alone, clipped
    ratios, AdamW on the adapters."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    # The same linear layers as ours, by the names that peft matches.
    targets = sorted({name.rpartition(".")[2] for name in linear_modules(read_architecture(folder)).values()})
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(base, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_LR, weight_decay=0.0)
    turns = [episode.turns[0] for group in batch.groups for episode in group.episodes]
    ids = torch.tensor(np.stack([np.concatenate([turn.prompt_ids, turn.token_ids]) for turn in turns])).long()
    behaviour = torch.tensor(np.stack([turn.logprobs for turn in turns]))
    answer = behaviour.shape[1]
    advantages = advantages_of(batch).reshape(-1, 1)

    def update() -> None:
        # One more than the answer: the logits at a token predict the next one.
        logits = model(ids, logits_to_keep=answer + 1).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, ids[:, -answer:, None])[..., 0]
        ratio = (logprobs - behaviour).exp()
        clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
        (-torch.minimum(ratio * advantages, clipped * advantages).mean()).backward()
        torch.nn.utils.clip_grad_norm_(trained, _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def published_share(rank: int, folder: Path, lora: LoRAConfig) -> float:
    """Return the share of a whole version's bytes that a version of adapters has, in float32."""
    specs = _engine(folder, lora).specs()
    base = draft(specs, version=0, dtype=torch.float32)
    return draft(specs, version=1, dtype=torch.float32, base=base).written_bytes / base.whole_bytes
