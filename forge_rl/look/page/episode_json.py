"""A whole episode as JSON for the page, bounded in size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from forge_rl.metrics.episode_files import RecordedEpisode
from forge_rl.metrics.vocabulary import texts_of
from forge_rl.types import Message, Turn

MOST_TOKENS = 1 << 15
"""Maximum tokens of an episode on the page, and tokens that it was shown."""
_MOST_LETTERS = 1 << 16
"""Maximum length of a message."""
_MOST_MESSAGES = 2000
"""Maximum messages of an episode, and maximum turns."""


def episode_json(name: str, record: RecordedEpisode, pieces: Sequence[bytes]) -> dict[str, Any]:
    """Return a recorded episode as JSON for the page.

    A turn's `tokens` are the texts of the generated tokens, or their ids if `pieces` is empty; `shown` has the texts of
    the tokens between the turn that it continues and its completion. A list of equal numbers is one number.
    """
    episode = record.episode
    room = _Room()
    segments = {turn: (segment, offset) for segment, run in enumerate(episode.runs) for offset, turn in enumerate(run)}
    turns, first = [], 0
    for place, turn in enumerate(episode.turns[:_MOST_MESSAGES]):
        # A turn's prompt begins with the previous turn of its run, prompt and answer; only the rest is new.
        segment, position = segments[place]
        previous = episode.turns[episode.runs[segment][position - 1]] if position else None
        start = len(previous.prompt_ids) + len(previous.token_ids) if previous is not None else 0
        tokens = slice(first, first := first + len(turn.token_ids))
        turns.append(_turn(record, turn, place, tokens, turn.prompt_ids[start:], room, pieces) | {"segment": segment})
    score = episode.score
    return {
        "name": name,
        **{key: getattr(record, key) for key in ("step", "kind", "group", "index", "version")},
        "set": _clipped(record.set),
        "given_answer": record.given_answer,
        "source": _clipped(episode.task.source),
        "task": _clipped(episode.task.id),
        "outcome": episode.outcome.value,
        "problem": _clipped(episode.problem),
        "seconds": None if record.given_answer else rounded(episode.seconds),
        "reward": None if score is None else rounded(score.total),
        "parts": [] if score is None else [[_clipped(key), rounded(value)] for key, value in score.parts.items()],
        "answer": "" if score is None else _clipped(score.answer),
        "feedback": "" if score is None else _clipped(score.feedback),
        "truth": [[_clipped(key), _clipped(_text(value))] for key, value in episode.task.truth.items()],
        "tools": _clipped(json.dumps(episode.task.tools, ensure_ascii=False)) if episode.task.tools else "",
        # The first turn's own messages, if they are known, contain the task's.
        "messages": [] if turns and turns[0]["messages"] else [_message(message) for message in episode.task.messages],
        "output": None if episode.output is None else _clipped(episode.output),
        "segments": len(episode.runs),
        "turns": turns,
        "more_turns": len(episode.turns) - len(turns),
        "has_texts": bool(pieces),
    }


class _Room:
    """Counts how much more of an episode fits on the page."""

    def __init__(self) -> None:
        self.tokens, self.shown, self.messages = MOST_TOKENS, MOST_TOKENS, _MOST_MESSAGES

    def take(self, name: str, count: int) -> int:
        """Return how many of `count` fit."""
        num_fitting = min(count, getattr(self, name))
        setattr(self, name, getattr(self, name) - num_fitting)
        return int(num_fitting)


def _turn(
    record: RecordedEpisode,
    turn: Turn,
    place: int,
    tokens: slice,
    shown_ids: npt.NDArray[np.int32],
    room: _Room,
    pieces: Sequence[bytes],
) -> dict[str, Any]:
    score, count = record.episode.score, room.take("tokens", len(turn.token_ids))
    values = score.tokens[place] if score is not None and place < len(score.tokens) else None
    logprobs, gaps = record.scores_of(turn, tokens)

    # The record's arrays cover the tokens of all turns, of which this turn has `tokens`.
    def turn_values(array: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
        return None if array is None else array[tokens][:count]

    return {
        "messages": [_message(message) for message in turn.messages[: room.take("messages", len(turn.messages))]],
        "text": _clipped(turn.text),
        "agent": clip(turn.agent, 80),
        "branch": clip(".".join(map(str, turn.branch)), 80),
        "calls": [
            {
                "name": _clipped(call.name),
                "arguments": _clipped(call.arguments),
                "seconds": None if call.seconds is None else rounded(call.seconds),
                "error": _clipped(call.error),
            }
            for call in turn.calls[: room.take("messages", len(turn.calls))]
        ],
        "seconds": None if record.given_answer else rounded(turn.seconds),
        "response_s": rounded(turn.response_s),
        "truncated": turn.truncated,
        "value": rounded(score.turns[place]) if score is not None and place < len(score.turns) else None,
        "prompt_tokens": len(turn.prompt_ids),
        "count": len(turn.token_ids),
        "shown": _texts(shown_ids[: room.take("shown", len(shown_ids))], pieces),
        "tokens": _texts(turn.token_ids[:count], pieces),
        "ids": turn.token_ids[:count].tolist(),
        "logprobs": _numbers(None if logprobs is None else logprobs[:count]),
        "versions": _numbers(turn.versions[:count]),
        "trained": _numbers(turn_values(record.trained)),
        "gaps": _numbers(None if gaps is None else gaps[:count]),
        "entropies": _numbers(turn_values(record.entropies)),
        "advantages": _numbers(turn_values(record.advantages)),
        "values": _numbers(None if values is None else np.asarray(values, np.float32)[:count]),
    }


def _texts(ids: npt.NDArray[np.int32], pieces: Sequence[bytes]) -> list[str]:
    return texts_of(ids.tolist(), pieces) if pieces else [f"{token} " for token in ids.tolist()]


def _numbers(values: npt.NDArray[Any] | None) -> Any:
    """Return the rounded values: a list, or one number if all are equal; None if they are unknown."""
    if values is None or not len(values):
        return None
    if values.dtype == np.bool_:
        values = values.astype(np.int8)
    numbers = [rounded(value) for value in values.tolist()]
    return numbers if any(value != numbers[0] for value in numbers) else numbers[0]


def rounded(value: float | None) -> float | int | None:
    """Round to 5 digits; None for NaN and infinity."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _message(message: Message) -> dict[str, str]:
    content, role = message.get("content"), message.get("role")
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    return {
        "role": clip(_text(role), 40),
        "content": "" if content is None else _clipped(_text(content)),
        **({"rest": _clipped(_text(rest))} if rest else {}),
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)


def _clipped(text: str) -> str:
    return clip(text, _MOST_LETTERS)


def clip(text: str, letters: int) -> str:
    """Return at most so many letters of a text, and how many follow."""
    return text if len(text) <= letters else f"{text[:letters]}… and {len(text) - letters} more letters"


def coded(texts: Iterable[str], letters: int) -> tuple[list[int], list[str]]:
    """Return each text's place in a list of the different ones, and that list."""
    places: dict[str, int] = {}
    codes = [places.setdefault(text, len(places)) for text in texts]
    return codes, [clip(text, letters) for text in places]
