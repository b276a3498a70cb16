"""Reward from a model: a sequence classifier in a Hugging Face folder, loaded once in each dedicated replica."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from forge_rl.errors import ModelError, check_flags
from forge_rl.models.resolve import model_in
from forge_rl.system.encodable import encodable
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode, Message, Score, Task

_LOADING = threading.Lock()
"""Held while a model loads: transformers replaces methods of its classes meanwhile, and two loads at once can leave
them replaced, after which no tied model of this process is tied."""


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """Scores an episode by a sequence classifier's logit for its conversation.

    --reward model:path=models/reward,replicas=2

    The conversation is the task's messages and tools and the episode's last text, rendered by the chat template of the
    model's tokenizer. A classifier with several labels scores by the probability of the last one. Queued episodes are
    scored in batches.
    """

    path: Path
    """Folder of a sequence classification model, with its tokenizer, or of a checkpoint of one."""
    replicas: int = 1
    """Number of processes that hold the model, in addition to --reward.replicas."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights."""
    device: str = "cpu"
    """Torch device of the model: cpu, or, for example, cuda:3 if nothing else needs that GPU's memory."""
    threads: int = 2
    """CPU threads per process."""
    batch: int = 16
    """Maximum episodes per batch."""
    max_tokens: int = 4096
    """Maximum tokens of a conversation; longer ones are truncated at the beginning."""
    sigmoid: bool = False
    """Apply a sigmoid to the logit of a classifier with one label."""
    _scorer: _ModelScorer | None = field(default=None, init=False, repr=False, compare=False)
    deadline_s: ClassVar[float] = 3600.0
    """Deadline of one score, including time in the queue."""

    def __post_init__(self) -> None:
        minima = {"replicas": 1, "threads": 1, "batch": 1, "max_tokens": 1}
        check_flags(self, "--reward model:", minimum=minima)
        object.__setattr__(self, "path", model_in(self.path.resolve()))
        try:
            config = json.loads((self.path / "config.json").read_text())
            kinds = config.get("architectures") or []
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ModelError(
                f"--reward model: {self.path} has no model: {getattr(error, 'strerror', None) or error}: config.json",
                hint="set path=FOLDER to a Hugging Face folder with config.json, safetensors and a tokenizer",
            ) from None
        if not any("SequenceClassification" in str(kind) for kind in kinds):
            raise ModelError(
                f"--reward model: {self.path} has {', '.join(map(str, kinds)) or 'no architecture'}, not a sequence "
                "classifier",
                hint="give the folder of an AutoModelForSequenceClassification, such as TRL's RewardTrainer writes",
            )

    @property
    def model_folder(self) -> Path:
        """Folder whose files define the reward; a resumed run compares their digests."""
        return self.path

    def __getstate__(self) -> Mapping[str, object]:
        return self.__dict__ | {"_scorer": None}

    def load(self, folder: Path | None = None) -> None:
        """Load the model, which can take minutes.

        Raises:
            ModelError: the folder lacks weights, a tokenizer or a chat template.
        """
        with _LOADING:
            if self._scorer is None:
                object.__setattr__(self, "_scorer", _ModelScorer(self))

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Return the model's score."""
        if self._scorer is None:
            await asyncio.to_thread(self.load)
        assert self._scorer is not None
        messages = [*task.messages, {"role": "assistant", "content": encodable(episode.text)}]
        return Score(total=await self._scorer.score(messages, task.tools))


class _ModelScorer:
    """Loaded model and its queue of episodes."""

    def __init__(self, config: RewardModel) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        torch.set_num_threads(config.threads)
        self._config = config
        self._tokenizer = Tokenizer(config.path)
        try:
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                config.path,
                dtype=getattr(torch, config.dtype),
                use_safetensors=True,  # other files may run code
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelError(
                f"the reward model in {config.path} cannot be loaded: {type(error).__name__}: {str(error)[:500]}",
                hint="give a complete Hugging Face folder: config.json, safetensors, tokenizer",
            ) from error
        if missing_keys := sorted(loading["missing_keys"]):
            raise ModelError(
                f"the reward model in {config.path} lacks weights: {', '.join(missing_keys)[:200]}",
                hint="give a trained sequence classifier: missing weights would be random",
            )
        self._model = model.eval().to(config.device)
        # Without a padding token, the model cannot tell where a shorter conversation ends.
        self._max_batch = config.batch if model.config.pad_token_id is not None else 1
        self._waiting: list[tuple[tuple[int, ...], asyncio.Future[float]]] = []
        self._running: asyncio.Task[None] | None = None

    async def score(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> float:
        """Return the score of a conversation, batched with others in the queue.

        Text that looks like a control token is encoded as text: an answer cannot end its turn and praise itself.
        """
        ids = self._tokenizer.render(messages, add_generation_prompt=False, tools=tools)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[float] = loop.create_future()
        # The end is kept: the answer that is judged comes last.
        self._waiting.append((ids[-self._config.max_tokens :], future))
        # One loop serves the queue: requests that arrive during a forward pass make up the next batch.
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._run())
        return await future

    async def _run(self) -> None:
        """Score queued episodes until the queue is empty."""
        while self._waiting:
            # The oldest with those nearest to it in length: little padding, and a long conversation is not passed over
            # for as long as shorter ones arrive.
            waiting, oldest = self._waiting, len(self._waiting[0][0])
            places = sorted(range(len(waiting)), key=lambda place: abs(len(waiting[place][0]) - oldest))
            batch = [waiting[place] for place in places[: self._max_batch]]
            self._waiting = [waiting[place] for place in sorted(places[self._max_batch :])]
            try:
                scores = await asyncio.to_thread(self._forward, [ids for ids, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        # A failed batch must not strand those who wait for it, nor end the loop for the rest of the
                        # queue.
                        future.set_exception(error)
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return a score for each row of token ids."""
        import torch

        longest, pad = max(map(len, rows)), self._model.config.pad_token_id
        # Padded at the end, both of shape (rows, longest); the classifier reads the last token that is not padding.
        ids = torch.tensor([[*row, *[pad or 0] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        with torch.inference_mode():
            device = self._config.device
            logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()
        if logits.shape[1] > 1:
            return [float(probability) for probability in logits.softmax(dim=-1)[:, -1]]
        values = [float(logit) for logit in logits[:, 0]]
        return (
            # math.exp overflows above 709.
            [1 / (1 + math.exp(-value)) if value > -700 else 0.0 for value in values]
            if self._config.sigmoid
            else values
        )
