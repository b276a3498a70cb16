"""Runs tinker-cookbook's own training loops against a server: python tinker_loops.py KIND MODEL URL FOLDER [STEPS].

Run by the Python of an environment with tinker and tinker-cookbook; the key is in TINKER_API_KEY. Data and worlds are
this file's, as the cookbook's are on the internet; the loops are the cookbook's, unmodified.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chz
import datasets
from tinker_cookbook import renderers, tokenizer_utils
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, PromptOnlyDataset, TeacherConfig
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.supervised import train as supervised_train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

RENDERER = "role_colon"
PAIRS = [(f"What is {a} + {b}?", str(a + b)) for a in range(1, 5) for b in range(1, 5)]


class Letters(ProblemEnv):
    """Rewards answers with many letters e, which a random model has some of."""

    def __init__(self, renderer: renderers.Renderer, question: str) -> None:
        super().__init__(renderer, format_coef=0.0)
        self.question = question

    def get_question(self) -> str:
        return self.question

    def check_answer(self, sample_str: str) -> bool:
        return len(sample_str) % 2 == 0

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return ""


class Problems(RLDataset):
    def __init__(self, renderer: renderers.Renderer) -> None:
        self.renderer = renderer

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        questions = [PAIRS[(2 * index + place) % len(PAIRS)][0] for place in range(2)]
        return [ProblemGroupBuilder(partial(Letters, self.renderer, question), num_envs=4) for question in questions]

    def __len__(self) -> int:
        return 100


@chz.chz
class ProblemsBuilder(RLDatasetBuilder):
    model_name: str

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        tokenizer = tokenizer_utils.get_tokenizer(self.model_name)
        return Problems(renderers.get_renderer(RENDERER, tokenizer)), None


@chz.chz
class PromptsBuilder(RLDatasetBuilder):
    model_name: str

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        tokenizer = tokenizer_utils.get_tokenizer(self.model_name)
        renderer = renderers.get_renderer(RENDERER, tokenizer)
        prompts = [question for question, _ in PAIRS]
        return PromptOnlyDataset(prompts, 2, 2, renderer, tokenizer), None


@chz.chz
class Comparisons(ComparisonDatasetBuilder):
    def get_train_and_test_datasets(self) -> tuple[datasets.Dataset, datasets.Dataset | None]:
        return datasets.Dataset.from_list([{"question": q, "answer": a} for q, a in PAIRS]), None

    def example_to_labeled_comparison(self, example: dict[str, Any]) -> LabeledComparison | None:
        prompt = [{"role": "user", "content": example["question"]}]
        answers = [[{"role": "assistant", "content": text}] for text in (example["answer"], "I do not know")]
        comparison = Comparison(prompt_conversation=prompt, completion_A=answers[0], completion_B=answers[1])
        return LabeledComparison(comparison=comparison, label="A")


def main(kind: str, model: str, url: str, folder: Path, steps: int = 3) -> None:
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=128, batch_size=4
    )
    folder.mkdir(parents=True, exist_ok=True)
    shared: dict[str, Any] = {
        "model_name": model,
        "recipe_name": f"recipe_{kind}",
        "renderer_name": RENDERER,
        "base_url": url,
        "lora_rank": 4,
        "log_path": str(folder / "log"),
        "max_steps": steps,
        "save_every": 2,
        "eval_every": 0,
    }
    if kind == "supervised":
        file = folder / "conversations.jsonl"
        turns = [
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            for question, answer in PAIRS
        ]
        file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
        data = FromConversationFileBuilder(file_path=str(file), common_config=common)
        asyncio.run(
            supervised_train.main(
                supervised_train.Config(
                    dataset_builder=data, learning_rate=1e-2, num_epochs=5, infrequent_eval_every=0, **shared
                )
            )
        )
    elif kind == "rl":
        problems = ProblemsBuilder(model_name=model)
        asyncio.run(
            rl_train.main(rl_train.Config(dataset_builder=problems, learning_rate=1e-3, max_tokens=8, **shared))
        )
    elif kind == "dpo":
        pairs = DPODatasetBuilderFromComparisons(common_config=common, comparison_builder=Comparisons())
        config = train_dpo.Config(dataset_builder=pairs, learning_rate=1e-3, infrequent_eval_every=0, **shared)
        train_dpo.main(config)
    elif kind == "distillation":
        prompts = DistillationDatasetConfig(
            dataset_builder=PromptsBuilder(model_name=model),
            teacher_config=TeacherConfig(base_model=model),
            groups_per_batch=2,
        )
        config = train_on_policy.Config(dataset_configs=[prompts], learning_rate=1e-3, max_tokens=8, **shared)
        asyncio.run(train_on_policy.main(config))
    else:
        raise SystemExit(f"{kind} is no loop")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), *map(int, sys.argv[5:]))
