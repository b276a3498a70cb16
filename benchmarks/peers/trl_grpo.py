"""Times GRPO steps of TRL's GRPOTrainer; runs in TRL's own environment: python trl_grpo.py SETTINGS.json

The settings are a JSON object with the fields of Settings. Stdout gets JSON lines: first the versions, then one per
optimizer step, each of which waits for a line on stdin. Imports nothing from forge_rl.
"""

from __future__ import annotations

import json
import math
import platform
import re
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

_INTEGER = re.compile(r"(?:(?<![\w)\]])-)?\d+")
"""A sign counts unless it follows an operand: "10-3" ends with 3, "= -3" with -3."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the run."""

    model: str
    """Folder of the model."""
    output: str
    """Output folder of the trainer."""
    tasks: list[dict[str, object]]
    """Groups of the run, in order: `messages`, and `gold`, an integer as text."""
    steps: int
    groups_per_batch: int
    group_size: int
    max_tokens: int
    completions_per_forward: int
    """Completions per forward and backward; gradients of all microbatches of a batch accumulate into one step."""
    dtype: str
    """Dtype of forward, backward and generation, "float32" or "bfloat16"; weights are float32."""
    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    max_grad_norm: float
    clip_low: float
    clip_high: float
    scale_rewards: str
    temperature: float
    seed: int

    @property
    def episodes(self) -> int:
        """Number of completions per step."""
        return self.groups_per_batch * self.group_size


class TimedTrainer(GRPOTrainer):
    """Times generation and scoring, which TRL does in one method, separately from the rest of a step."""

    generate_s = 0.0

    def _generate_and_score_completions(self, inputs: list[dict[str, object]]) -> dict[str, object]:
        began = time.perf_counter()
        outputs: dict[str, object] = super()._generate_and_score_completions(inputs)
        self.generate_s += time.perf_counter() - began
        return outputs


class StepTimer(TrainerCallback):
    """Times each optimizer step, checks that it did the work, and prints the result."""

    def __init__(self, settings: Settings, scored: Scored, out: TextIO) -> None:
        self._settings = settings
        self._scored = scored
        self._out = out
        self.trainer: TimedTrainer
        self._before = torch.empty(0)
        self._began = 0.0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if not sys.stdin.readline():
            raise SystemExit(f"step {state.global_step} was not requested")
        self._before = self._watched().clone()
        self._scored.reset(self._step_tasks(state.global_step))
        self.trainer.generate_s = 0.0
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        seconds = time.perf_counter() - self._began
        scored = self._scored
        if scored.count != self._settings.episodes:
            raise SystemExit(f"step {state.global_step} had {scored.count} completions, not {self._settings.episodes}")
        after = self._watched()
        if not torch.isfinite(after).all():
            raise SystemExit(f"weights are not finite after step {state.global_step}")
        mixed = sum(len(set(scored.rewards[task])) > 1 for task in range(self._settings.groups_per_batch))
        changed = not torch.equal(self._before, after)
        if mixed and not changed:
            raise SystemExit(f"step {state.global_step} had rewards that differ, but changed no weight")
        row = {
            "step": state.global_step,
            "seconds": seconds,
            "seconds_generate": self.trainer.generate_s,
            "seconds_train": seconds - self.trainer.generate_s,
            "episodes": scored.count,
            "response_tokens": scored.tokens,
            "reward": math.fsum(map(math.fsum, scored.rewards)) / scored.count,
            "mixed_groups": mixed,
            "weights_changed": changed,
        }
        print(json.dumps(row), file=self._out, flush=True)

    def _watched(self) -> torch.Tensor:
        """Return one weight matrix in the middle of the model."""
        layers = self.trainer.model.model.layers
        weight: torch.Tensor = layers[len(layers) // 2].self_attn.q_proj.weight
        return weight.detach()

    def _step_tasks(self, step: int) -> list[dict[str, object]]:
        groups = self._settings.groups_per_batch
        return self._settings.tasks[step * groups : (step + 1) * groups]


class Scored:
    """Reward function that records the completions of the current step."""

    __name__ = "last_integer"  # TRL names its metrics by it

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.reset([])

    def reset(self, tasks: list[dict[str, object]]) -> None:
        """Begin a step on these tasks."""
        self._tasks = tasks
        self.count = self.tokens = 0
        self.rewards: list[list[float]] = []

    def __call__(
        self,
        *,
        prompts: list[object],
        completions: list[list[dict[str, str]]],
        completion_ids: list[list[int]],
        gold: list[str],
        **_: object,
    ) -> list[float]:
        """Return 1.0 for answers whose last integer is the gold one."""
        size = self._settings.group_size
        if prompts != [task["messages"] for task in self._tasks for _ in range(size)]:
            raise SystemExit("TRL did not answer the tasks of this step in their order")
        if not all(1 <= len(ids) <= self._settings.max_tokens for ids in completion_ids):
            raise SystemExit(f"completions have {sorted({len(ids) for ids in completion_ids})} tokens")
        rewards = [
            float(_last_integer(turns[-1]["content"]) == int(right))
            for turns, right in zip(completions, gold, strict=True)
        ]
        self.count += len(rewards)
        self.tokens += sum(map(len, completion_ids))
        self.rewards += [rewards[start : start + size] for start in range(0, len(rewards), size)]
        return rewards


def _last_integer(text: str) -> int | None:
    matches = _INTEGER.findall(text)
    return int(matches[-1]) if matches else None


def _config(settings: Settings) -> GRPOConfig:
    """Return the recipe's method as TRL settings, tuned for TRL's highest speed on a CPU."""
    parts, rest = divmod(settings.episodes, settings.completions_per_forward)
    if rest:
        raise SystemExit(f"{settings.episodes} completions do not split by {settings.completions_per_forward}")
    return GRPOConfig(
        output_dir=settings.output,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.completions_per_forward,
        gradient_accumulation_steps=parts,  # steps_per_generation follows it: one generation for the whole batch
        num_generations=settings.group_size,
        max_completion_length=settings.max_tokens,
        shuffle_dataset=False,
        temperature=settings.temperature,
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        beta=0.0,
        loss_type="dapo",
        epsilon=settings.clip_low,
        epsilon_high=settings.clip_high,
        scale_rewards=settings.scale_rewards,
        use_vllm=False,
        use_cpu=True,
        bf16=settings.dtype == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,  # TRL's default is True, which computes each forward twice
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings.seed,
    )


def main() -> None:
    """Run all steps."""
    out, sys.stdout = sys.stdout, sys.stderr  # keep library output separate from our lines
    disable_progress_bar()
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    if len(settings.tasks) != settings.steps * settings.groups_per_batch:
        raise SystemExit(f"{len(settings.tasks)} tasks do not match {settings.steps} steps")
    packages = {name: version(name) for name in ("torch", "trl", "transformers", "accelerate", "datasets")}

    rows = [{"prompt": task["messages"], "gold": task["gold"]} for task in settings.tasks]
    scored = Scored(settings)
    timer = StepTimer(settings, scored, out)
    trainer = TimedTrainer(
        model=settings.model,
        processing_class=AutoTokenizer.from_pretrained(settings.model, local_files_only=True),
        reward_funcs=scored,
        args=_config(settings),
        train_dataset=Dataset.from_list(rows),
        callbacks=[timer],
    )
    timer.trainer = trainer
    dtypes = {parameter.dtype for parameter in trainer.model.parameters()}
    if dtypes != {torch.float32}:
        raise SystemExit(f"weights are {dtypes}, not float32")
    print(json.dumps({"versions": {"python": platform.python_version()} | packages}), file=out, flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
