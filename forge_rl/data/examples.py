"""Episodes of given answers, to train on without rollouts: conversations, pairs of a preferred and another answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from forge_rl.errors import ModelError, TaskError
from forge_rl.tokens.stops import final_stop
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode, Message, Task, Turn


def conversation_episodes(task: Task, tokenizer: Tokenizer) -> tuple[Episode]:
    """Return the one episode of a conversation, for supervised fine-tuning: trained are the assistant's messages.

    They are the truth's "completion", text or messages, or else its "answer". Each of the assistant's messages there is
    a turn: its prompt is what the chat template shows before it, and its tokens are what the template writes for it, up
    to and including the token that ends a turn. So thinking is trained as the template writes it in the last message,
    and later turns do not see it if the template then leaves it out; they are a segment of their own.

    The tokens have no behaviour policy: their logprobs are 0, and their versions -1.

    Raises:
        TaskError: the task has no such answer; the template refuses it, or does not continue the prompt with it.
    """
    given = task.truth.get("completion", task.truth.get("answer"))
    return (_episode(task, _messages(given, "completion or answer"), tokenizer),)


def preference_episodes(task: Task, tokenizer: Tokenizer) -> tuple[Episode, Episode]:
    """Return the episodes of a pair, for DPO: the truth's "chosen", then its "rejected", made as for a conversation.

    Raises:
        TaskError: as for `conversation_episodes`.
    """
    chosen, rejected = (_messages(task.truth.get(name), name) for name in ("chosen", "rejected"))
    return _episode(task, chosen, tokenizer), _episode(task, rejected, tokenizer)


def comparison_episodes(task: Task, tokenizer: Tokenizer) -> tuple[Episode, Episode]:
    """Return the episodes of a pair, for a reward model: the truth's "chosen", then its "rejected".

    Each is the whole conversation as a prompt, with one token after it, at which a value model has the value of the
    conversation. That is where `rewards.reward_model`, and classifiers in transformers, read their score: the last
    token that is not padding.

    Raises:
        TaskError: as for `conversation_episodes`.
    """
    chosen, rejected = (_messages(task.truth.get(name), name) for name in ("chosen", "rejected"))
    return _compared(task, chosen, tokenizer), _compared(task, rejected, tokenizer)


def _messages(given: object, name: str) -> list[Message]:
    """Return the messages of a given answer, which may be text."""
    if isinstance(given, str) and given:
        return [{"role": "assistant", "content": given}]
    if not isinstance(given, list) or not given or any(not isinstance(one, dict) for one in given):
        raise TaskError(
            f"it has no {name} to train on",
            hint=f'give its truth the {name.partition(" ")[0]}, text or messages such as {{"role": "assistant", ...}}',
        )
    return given


def _episode(task: Task, answer: Sequence[Message], tokenizer: Tokenizer) -> Episode:
    messages = [*task.messages, *answer]
    places = range(len(task.messages), len(messages))
    turns = [_turn(task, messages[: at + 1], tokenizer) for at in places if messages[at]["role"] == "assistant"]
    return Episode(task=task, turns=tuple(turns))


def _turn(task: Task, messages: Sequence[Message], tokenizer: Tokenizer) -> Turn:
    """Return the turn of the last of these messages."""
    whole = _rendered(task, messages, tokenizer)
    prompt = _rendered(task, messages[:-1], tokenizer, add_generation_prompt=True)
    begin = _shared(prompt, whole)
    # Some templates open an assistant's turn with more than all answers have, such as <think>.
    if begin < len(prompt) and begin < len(_rendered(task, messages[:-1], tokenizer)):
        raise _refused("changes the messages before an answer when it is added")
    stops = [place for place in range(begin, len(whole)) if whole[place] in tokenizer.stop_ids]
    end = stops[-1] + 1 if stops else len(whole)
    if begin == end:
        raise _refused("does not show an assistant message")
    token_ids, stop = whole[begin:end], final_stop(tokenizer)
    text = tokenizer.decode(token_ids)
    if not stops and stop is not None:
        # Some templates end a turn only when another follows: the model would never learn to stop.
        token_ids = (*token_ids, stop)
    return Turn.given(whole[:begin], token_ids, text)


def _compared(task: Task, answer: Sequence[Message], tokenizer: Tokenizer) -> Episode:
    ids = _rendered(task, [*task.messages, *answer], tokenizer)
    while ids and ids[-1] == tokenizer.pad_id:
        ids = ids[:-1]
    return Episode(task=task, turns=(Turn.given(ids, tokenizer.stop_ids[:1] or (0,), ""),))


def _rendered(
    task: Task, messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool = False
) -> tuple[int, ...]:
    try:
        return tokenizer.render(messages, add_generation_prompt=add_generation_prompt, tools=task.tools)
    except ModelError as error:
        raise TaskError(error.message, hint=error.hint) from error


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _refused(what: str) -> TaskError:
    return TaskError(
        f"the chat template {what}, so its tokens cannot be told apart",
        hint="change the messages, or the model's chat_template.jinja",
    )
