"""Thoughts and answers: what rewards, environments and tool parsers see of a completion."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from forge_rl.envs.protocol import Step
from forge_rl.rewards.formats import Format, Regex
from forge_rl.rewards.protocol import text_for
from forge_rl.rewards.reward_flag import build_reward
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.tokens.thoughts import without_thoughts
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode, Task, Turn
from tests.staged_rollouts import StagedEnvironment, StagedReward, TwoTurns

TASK = Task(id="1", source="s", messages=({"role": "user", "content": "2+3?"},), truth={"answer": "5"})
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS = CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")
HARMONY = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"


def tokenizer_with(
    small_tokenizer: Path,
    folder: Path,
    template: str = CHATML,
    *,
    tags: tuple[str, ...] = (),
    special: tuple[str, ...] = (),
) -> Tokenizer:
    """The small tokenizer with another template, and with more tokens."""
    hf = AutoTokenizer.from_pretrained(small_tokenizer)
    hf.add_special_tokens({"additional_special_tokens": list(special)})
    hf.add_tokens(list(tags))
    hf.chat_template = template
    hf.save_pretrained(folder)
    config = json.loads((small_tokenizer / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": len(hf)}))
    return Tokenizer(folder)


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        ("It is 5.", False, "It is 5."),
        ("<think>2 and 3</think>\n\nIt is 5.", False, "It is 5."),
        ("<think>perhaps \\boxed{5}", False, ""),
        ("perhaps \\boxed{5}", True, ""),
        ("perhaps 5</think> no, 6", True, "no, 6"),
        ("perhaps 5</think> no, 6", False, "no, 6"),  # the prompt has opened it, which the text does not show
        ("<think>a</think>5 <think>or 6", False, "5 "),
        ("<think>a<think>b</think>5", False, "5"),
        ("<think>a</think>b</think>5", False, "5"),
    ],
)
def test_an_answer_is_what_follows_finished_thoughts(text: str, opened: bool, answer: str) -> None:
    assert without_thoughts(text, is_open=opened) == answer
    assert without_thoughts(answer) == answer


@pytest.mark.parametrize(
    ("added", "template", "completion", "answer"),
    [
        ({}, CHATML, "It is 5.", None),
        ({}, CHATML, "<think>2 and 3</think>It is 5.", "It is 5."),
        ({}, OPENS, "2 and 3", ""),
        ({}, OPENS, "2 and 3</think>It is 5.", "It is 5."),
        ({"tags": ("<think>", "</think>")}, OPENS, "2 and 3", ""),
        ({"tags": ("<think>", "</think>")}, OPENS, "2 and 3</think>It is 5.", "It is 5."),
        ({"special": ("[THINK]", "[/THINK]")}, CHATML, "[THINK]2 and 3[/THINK]It is 5.", "It is 5."),
        ({"special": ("[THINK]", "[/THINK]")}, CHATML, "[THINK]2 and 3", ""),
        ({"special": ("[THINK]", "[/THINK]")}, CHATML, "It is 5.", None),
    ],
)
def test_thoughts_are_known_by_the_tags_of_the_model(
    small_tokenizer: Path, tmp_path: Path, added, template, completion, answer
) -> None:
    tokenizer = tokenizer_with(small_tokenizer, tmp_path, template, **added)
    prompt, ids = tokenizer.render(TASK.messages), tokenizer.encode(completion)
    assert tokenizer.thoughts.answer(prompt, ids, tokenizer.decode(ids)) == answer


def test_a_tag_in_a_question_opens_no_thought(small_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(small_tokenizer, tmp_path, tags=("<think>", "</think>"))
    prompt = tokenizer.render([{"role": "user", "content": "What does <think> mean?"}])
    assert tokenizer.thoughts.answer(prompt, tokenizer.encode("A thought."), "A thought.") is None


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (
            "<|channel|>analysis<|message|>2 and 3<|end|><|start|>assistant<|channel|>final<|message|>It is 5.",
            "It is 5.",
        ),
        ("<|channel|>analysis<|message|>perhaps 5", ""),
        ("It is 5.", None),
    ],
)
def test_thoughts_of_gpt_oss_are_messages_on_another_channel(
    small_tokenizer: Path, tmp_path: Path, completion: str, answer: str
) -> None:
    special = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
    tokenizer = tokenizer_with(small_tokenizer, tmp_path, HARMONY, special=special)
    ids = tokenizer.encode(completion)
    assert tokenizer.thoughts.answer(tokenizer.render(TASK.messages), ids, tokenizer.decode(ids)) == answer


def test_rewards_see_the_answer_unless_they_ask_for_thoughts() -> None:
    turn = Turn(prompt_ids=(1,), token_ids=(2,), logprobs=(0,), versions=(0,), text="<think>6</think>5", answer="5")
    episode = Episode(task=TASK, turns=(turn,))
    assert (episode.text, episode.whole_text) == ("5", "<think>6</think>5")
    assert text_for(build_reward(["match"]), episode) == "5"
    assert text_for(build_reward(["match:thoughts=true"]), episode) == "<think>6</think>5"
    assert text_for(Format(), episode) == "<think>6</think>5", "whose first tag is that of the thoughts"
    assert text_for(Regex(pattern="5"), replace(episode, output="6")) == "6"


class Listening(TwoTurns):
    """Remembers what it is told, and ends."""

    told = ""
    thoughts = False

    async def step(self, answer: str, *, truncated: bool = False) -> Step:
        type(self).told = answer
        return Step(done=True)


class ListeningToThoughts(Listening):
    thoughts = True


CALL = '[TOOL_CALLS]add[ARGS]{"a": 2}'
MISTRAL, THINK = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"), ("<think>", "</think>")


@pytest.mark.parametrize(
    ("added", "completion", "told", "told_thoughts"),
    [
        ({"special": MISTRAL}, f"Sure. {CALL}<|im_end|>", f"Sure. {CALL}", f"Sure. {CALL}"),
        ({"special": MISTRAL}, f"[THINK]add[/THINK]{CALL}<|im_end|>", CALL, f"[THINK]add[/THINK]{CALL}"),
        ({"special": MISTRAL}, f"[THINK]{CALL}", "", f"[THINK]{CALL}"),
        ({"special": MISTRAL[:2], "tags": THINK}, f"<think>x</think>{CALL}", CALL, f"<think>x</think>{CALL}"),
        ({"special": MISTRAL}, "It is 5.<|im_end|>", "It is 5.", "It is 5."),
    ],
)
def test_an_environment_sees_tags_that_are_special_tokens(
    small_tokenizer: Path, tmp_path: Path, added, completion: str, told: str, told_thoughts: str
) -> None:
    """As in Mistral's and DeepSeek's formats: one that reads calls itself finds none without their tags."""
    tokenizer = tokenizer_with(small_tokenizer, tmp_path, **added)

    async def decode(prompt_ids: object) -> Turn:
        ids = np.asarray(tokenizer.encode(completion))
        text, zeros = tokenizer.decode(ids), [0] * len(ids)
        answer = tokenizer.thoughts.answer(prompt_ids, ids, text)  # type: ignore[arg-type]
        return Turn(prompt_ids=prompt_ids, token_ids=ids, logprobs=zeros, versions=zeros, text=text, answer=answer)

    for kind, expected in ((Listening, told), (ListeningToThoughts, told_thoughts)):
        runner = EpisodeRunner(tokenizer, StagedEnvironment(kind), StagedReward(lambda *_: 0.0))  # type: ignore[arg-type]
        asyncio.run(runner(TASK, decode))  # type: ignore[arg-type]
        assert kind.told == expected


def test_a_stop_string_cuts_a_text_with_tags_as_one_without(small_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(small_tokenizer, tmp_path, special=MISTRAL)
    assert tokenizer.tagged_text(tokenizer.encode("[TOOL_CALLS]add[ARGS]{} STOP"), "add{}") == "[TOOL_CALLS]add[ARGS]{}"
