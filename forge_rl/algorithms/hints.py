"""Privileged information for self-distillation: text that a teacher sees in addition to the task's messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from forge_rl.types import Group, Message

Hint: TypeAlias = Literal["none", "solution", "demonstration", "feedback"]
"""Kind of text that a teacher sees in addition to the task; see `hint_of`."""
HintOf: TypeAlias = Callable[[Group, int], str | None]
"""Returns the text that the teacher sees for the episode of a group with this index; None for no text."""
_SUCCESS = 0.5
"""Minimum reward of an episode that is shown as a correct answer: SDPO's success_reward_threshold."""


def hint_of(group: Group, index: int, kind: Hint) -> str | None:
    """Return the text that the teacher of an episode is shown below the task; None if the task or the group has none.

        hint_of(group, 0, "solution")  # "This is a reference solution: ..."

    solution: the truth's "solution", or else its "answer", as in OPSD (arXiv 2601.18734).
    demonstration: the truth's "demonstration", an expert's answer to the task, as in SDFT (arXiv 2601.19897).
    feedback: the best answer of another episode of the group with a reward of at least 0.5, without its thinking; or,
        if all others failed, the scorer's `Score.feedback` on this one: SDPO (arXiv 2601.20802).
    """
    if kind == "feedback":
        # An episode is never shown its own answer.
        successes = [
            episode for place, episode in enumerate(group.episodes) if place != index and episode.reward >= _SUCCESS
        ]
        best = max(successes, key=lambda episode: episode.reward, default=None)
        if best is not None and (answer := _answer(best.text)):
            return f"This is a correct answer:\n\n{answer}\n\nNow answer the question correctly yourself."
        score = group.episodes[index].score
        if score is None or not score.feedback:
            return None
        hint = f"This is feedback on an earlier, unsuccessful attempt:\n\n{score.feedback}"
        return f"{hint}\n\nNow answer the question correctly."
    if kind == "solution":
        truth_text = _text(group.task.truth, "solution") or _text(group.task.truth, "answer")
        hint = f"This is a reference solution:\n\n{truth_text}\n\nNow answer the question yourself."
    else:
        truth_text = _text(group.task.truth, "demonstration")
        hint = f"This is an example of a good answer:\n\n{truth_text}\n\nNow answer the question yourself."
    return hint if truth_text else None


def with_hint(messages: tuple[Message, ...], hint: str) -> tuple[Message, ...] | None:
    """Append a hint to the last message; None if that is not a user's text."""
    *before, last = messages
    content = last.get("content")
    if last.get("role") != "user" or not isinstance(content, str):
        return None
    return (*before, {**last, "content": f"{content}\n\n{hint}"})


def _answer(text: str) -> str:
    """Return an answer without the thinking before it."""
    return text.rpartition("</think>")[2].strip()


def _text(truth: Mapping[str, object], name: str) -> str:
    value = truth.get(name)
    return str(value).strip() if isinstance(value, str | int | float) else ""
