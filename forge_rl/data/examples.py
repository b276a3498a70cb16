"""Episodes of given answers, to train on without rollouts: conversations, pairs of a preferred and another answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forge_rl.data.given_text import check_answer, check_context
from forge_rl.data.sources.messages import read_messages
from forge_rl.data.sources.tables import RowError
from forge_rl.errors import ModelError, TaskError
from forge_rl.tokens.message_form import THOUGHT_KEYS
from forge_rl.tokens.prefix_encoder import PrefixEncoder, shared_length
from forge_rl.tokens.stops import final_stop
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode, Message, Task, Turn

_PAIR = ("chosen", "rejected")
"""Names of a pair's answers in the truth."""


def conversation_episodes(task: Task, tokenizer: Tokenizer) -> tuple[Episode]:
    """Return the one episode of a conversation, for supervised fine-tuning, which trains the assistant's messages.

    They are in the truth's "completion", text or messages, or else in its "answer". Each of the assistant's messages
    there whose "weight" is not 0 is a turn: its prompt is the text that the chat template shows before it, and its
    tokens are those that the template writes for it, up to and including the token that ends a turn. So thinking is
    trained as the template writes it in the last message. If the template then leaves it out of the history, later
    turns do not see it and form a segment of their own.

    The tokens have no behaviour policy: their logprobs are 0, and their versions -1.

    Raises:
        TaskError: the task has no such answer; the template refuses it, does not continue the prompt with it, or leaves
            out some of its text.
    """
    completion = task.truth.get("completion", task.truth.get("answer"))
    return (_episode(task, _answer(completion, "completion or answer"), tokenizer),)


def preference_episodes(task: Task, tokenizer: Tokenizer) -> tuple[Episode, Episode]:
    """Return the episodes of a pair, for DPO: the truth's "chosen", then its "rejected", made as for a conversation.

    Raises:
        TaskError: as for `conversation_episodes`, or both have the same tokens.
    """
    chosen_episode, rejected_episode = (
        _episode(task, _answer(task.truth.get(name), name), tokenizer) for name in _PAIR
    )
    _check_differ(chosen_episode, rejected_episode)
    return chosen_episode, rejected_episode


def comparison_episodes(task: Task, tokenizer: Tokenizer) -> tuple[Episode, Episode]:
    """Return the episodes of a pair, for a reward model: the truth's "chosen", then its "rejected".

    Each is the whole conversation as a prompt, with one token after it, at which a value model has the value of the
    conversation. That is where `rewards.reward_model`, and classifiers in transformers, read their score: the last
    token that is not padding.

    Raises:
        TaskError: as for `preference_episodes`.
    """
    chosen_episode, rejected_episode = (
        _compared(task, _answer(task.truth.get(name), name), tokenizer) for name in _PAIR
    )
    _check_differ(chosen_episode, rejected_episode)
    return chosen_episode, rejected_episode


def _check_differ(chosen_episode: Episode, rejected_episode: Episode) -> None:
    turns = zip(chosen_episode.turns, rejected_episode.turns, strict=False)
    is_same = all(np.array_equal(chosen_turn.context, rejected_turn.context) for chosen_turn, rejected_turn in turns)
    if is_same and len(chosen_episode.turns) == len(rejected_episode.turns):
        raise TaskError(
            "the chat template writes the same tokens for its chosen and its rejected answer",
            hint="remove the pair, or change the model's chat_template.jinja",
        )


def _answer(answer: object, name: str) -> list[Message]:
    """Return the messages of a given answer, which may be text."""
    if isinstance(answer, str) and answer:
        return [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list) or not answer or any(not isinstance(message, dict) for message in answer):
        raise TaskError(
            f"it has no {name} to train on",
            hint=f'give its truth the {name.partition(" ")[0]}, text or messages such as {{"role": "assistant", ...}}',
        )
    return answer


def _conversation(task: Task, answer: Sequence[Message], tokenizer: Tokenizer) -> list[Message]:
    """Return prompt and answer in the form that the chat template reads."""
    try:
        messages = read_messages("messages", [*task.messages, *answer])
    except RowError as error:
        raise TaskError(str(error), hint=error.hint) from error
    return tokenizer.message_form.with_thoughts(messages)


def _episode(task: Task, answer: Sequence[Message], tokenizer: Tokenizer) -> Episode:
    messages = _conversation(task, answer, tokenizer)
    places = [
        place
        for place in range(len(task.messages), len(messages))
        if messages[place]["role"] == "assistant" and messages[place].get("weight") != 0
    ]
    if not places:
        raise TaskError("all its answers have weight 0, so none is trained", hint="leave the row out")
    turns: list[Turn] = []
    encoder = tokenizer.prefix_encoder()
    first = num_checked = 0  # messages and tokens that earlier turns have checked
    for place in places:
        # Each answer is rendered as the last message, as it was when the model wrote it; templates may shorten earlier
        # ones.
        turn = _turn(task, messages[: place + 1], tokenizer, encoder)
        if turns and not np.array_equal(turns[-1].prompt_ids, turn.prompt_ids[:num_checked]):
            num_checked = 0
        try:
            check_context(messages[first:place], turn.prompt_ids[num_checked:], tokenizer, first=first + 1)
        except TaskError:
            # A template may write a later message before earlier ones, as Mistral's does with a system message.
            check_context(messages[first:place], turn.prompt_ids, tokenizer, first=first + 1)
        check_answer(messages[place], place + 1, turn.token_ids, tokenizer)
        turns.append(turn)
        first, num_checked = place + 1, len(turn.prompt_ids)
    return Episode(task=task, turns=tuple(turns))


def _turn(task: Task, messages: Sequence[Message], tokenizer: Tokenizer, encoder: PrefixEncoder) -> Turn:
    """Return the turn of the last of these messages."""
    # The answer's tokens are those that it adds: what the conversation has after what it shares with the prompt.
    conversation_ids = _rendered(task, messages, tokenizer, encoder)
    prompt_ids = _rendered(task, messages[:-1], tokenizer, encoder, add_generation_prompt=True)
    begin = shared_length(prompt_ids, conversation_ids)
    # Some templates open an assistant's turn with more than all answers have, such as <think>.
    if begin < len(prompt_ids) and begin < len(_rendered(task, messages[:-1], tokenizer, encoder)):
        # gpt-oss's leaves out the thoughts before an answer once that is there; who writes it still sees them.
        answer_ids = _after(_last_message(task, messages[:-1], prompt_ids, tokenizer), conversation_ids)
        if answer_ids is None:
            raise _refused("changes the messages before an answer when it is added")
        conversation_ids, begin = (*prompt_ids, *answer_ids), len(prompt_ids)
    # What follows the last stop, such as a line break, is the template's; the model never writes it.
    stops = [place for place in range(begin, len(conversation_ids)) if conversation_ids[place] in tokenizer.stop_ids]
    end = stops[-1] + 1 if stops else len(conversation_ids)
    if begin == end:
        raise _refused("does not show an assistant message")
    token_ids, stop = conversation_ids[begin:end], final_stop(tokenizer)
    text = tokenizer.decode(token_ids)
    if not stops and stop is not None:
        # Some templates end a turn only when another follows: the model would never learn to stop.
        token_ids = (*token_ids, stop)
    return Turn.given(conversation_ids[:begin], token_ids, text)


def _last_message(
    task: Task, messages: Sequence[Message], prompt: tuple[int, ...], tokenizer: Tokenizer
) -> Sequence[int]:
    """Return the tokens of a prompt from its last message on, if an answer before that has thoughts, or else none."""
    if not any(message.get(key) for message in messages[:-1] for key in THOUGHT_KEYS):
        return ()
    return prompt[shared_length(prompt, _rendered(task, messages[:-1], tokenizer)) :]


def _after(part: Sequence[int], ids: Sequence[int]) -> Sequence[int] | None:
    """Return the ids after the last occurrence of a part; None if there is none."""
    size = len(part)
    places = (place for place in range(len(ids) - size, -1, -1) if ids[place : place + size] == part)
    return next((ids[place + size :] for place in places), None) if size else None


def _compared(task: Task, answer: Sequence[Message], tokenizer: Tokenizer) -> Episode:
    messages = _conversation(task, answer, tokenizer)
    ids = _rendered(task, messages, tokenizer)
    check_context(messages[:-1], ids, tokenizer, first=1)
    check_answer(messages[-1], len(messages), ids, tokenizer)
    # The score is read at the last token that is not padding, so trailing padding tokens must go.
    while ids and ids[-1] == tokenizer.pad_id:
        ids = ids[:-1]
    return Episode(task=task, turns=(Turn.given(ids, tokenizer.stop_ids[:1] or (0,), ""),))


def _rendered(
    task: Task,
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    encoder: PrefixEncoder | None = None,
    *,
    add_generation_prompt: bool = False,
) -> tuple[int, ...]:
    try:
        return tokenizer.render(
            messages, add_generation_prompt=add_generation_prompt, tools=task.tools, encoder=encoder
        )
    except ModelError as error:
        raise TaskError(error.message, hint=error.hint) from error


def _refused(problem: str) -> TaskError:
    return TaskError(
        f"the chat template {problem}, so its tokens cannot be told apart",
        hint="change the messages, or the model's chat_template.jinja",
    )
