"""Text to tokens and back, on the bundled model's tokenizer and on small templates."""

import json
import shutil
from pathlib import Path

import pytest

from forge_rl.data.examples import conversation_episodes
from forge_rl.data.scan import template_digest
from forge_rl.errors import ModelError
from forge_rl.tokens.stops import describe_added_stop, name_added_stop
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Task
from tests.tiny import bundled_folder

QUESTION = ({"role": "user", "content": "What is 2+3?"},)


@pytest.fixture(scope="module")
def folder(small_tokenizer: Path) -> Path:
    return small_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_folder())


def _with_template(folder: Path, target: Path, template: str | None) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, target / name)
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    return target


def test_a_rendered_question_ends_where_the_completion_begins(tokenizer: Tokenizer) -> None:
    ids = tokenizer.render(QUESTION)
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1
    assert ids.count(1) == 3


def test_without_the_prompt_the_conversation_ends_with_the_user(tokenizer: Tokenizer) -> None:
    ids = tokenizer.render(QUESTION, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special=False).endswith("What is 2+3?<|im_end|>\n")


def test_decoding_leaves_special_tokens_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([1, *tokenizer.encode("a , b ."), 2, 2]) == "a , b ."


def test_pieces_of_tokens_spell_the_text(tokenizer: Tokenizer) -> None:
    text = "né 日本 😀\n  two<|im_end|>"
    ids = tokenizer.hf.encode(text)
    pieces = [tokenizer.pieces()[token] for token in ids]
    assert b"".join(pieces) == text.encode()
    assert pieces[-1] == b"<|im_end|>"


def test_digits_stand_apart_from_blanks_as_in_training(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("12  34")]
    assert pieces == ["1", "2", "  ", "3", "4"]


def test_ids_of_the_bundled_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.stop_ids == (2,)
    assert tokenizer.vocab_size == 49152


def test_stop_ids_join_generation_config_and_config(folder: Path, tmp_path: Path) -> None:
    _with_template(folder, tmp_path, "{{ messages[0].content }}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    assert Tokenizer(tmp_path).stop_ids == (0, 2, 5)


def test_extending_a_finished_turn_equals_rendering_it_whole(tokenizer: Tokenizer) -> None:
    reply = {"role": "user", "content": "And 4+4?"}
    answer = {"role": "assistant", "content": "It is 5."}
    turn = (*tokenizer.render(QUESTION), *tokenizer.encode("It is 5."), 2)
    assert tuple(tokenizer.extend(turn, [reply])) == tokenizer.render([*QUESTION, answer, reply])


def test_extending_keeps_the_ids_of_the_engine(tokenizer: Tokenizer) -> None:
    odd = (*tokenizer.render(QUESTION), *tokenizer.encode("I"), *tokenizer.encode("t"), 2)  # "It" is one token
    extended = tokenizer.extend(odd, [{"role": "tool", "content": "8"}])
    assert tuple(extended[: len(odd)]) == odd
    assert tokenizer.decode(extended[len(odd) :], skip_special=False) == (  # a template that knows no tools
        "\n<|im_start|>user\n<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_extending_a_truncated_turn_ends_it_first(tokenizer: Tokenizer) -> None:
    cut = (*tokenizer.render(QUESTION), *tokenizer.encode("It is"))
    extended = tokenizer.extend(cut, [{"role": "user", "content": "Go on."}])
    assert tuple(extended[: len(cut)]) == cut
    assert tokenizer.decode(extended[len(cut) :], skip_special=False) == (
        "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_without_a_chat_template_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no chat template"):
        Tokenizer(_with_template(folder, tmp_path, None))


def test_what_a_template_refuses_is_told_with_the_roles(folder: Path, tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ModelError, match=r"\['user'\]: roles must alternate"):
        Tokenizer(_with_template(folder, tmp_path, template)).render(QUESTION)


def test_a_template_that_drops_completions_cannot_be_extended(folder: Path, tmp_path: Path) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ModelError, match="drops earlier completions"):
        Tokenizer(_with_template(folder, tmp_path, template)).extend((1, 2), QUESTION)


def test_mistrals_own_tokenizer_beside_the_folders_is_not_taken(folder: Path, tmp_path: Path) -> None:
    model = _with_template(folder, tmp_path, "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    expected = Tokenizer(model).render(QUESTION)
    (model / "tekken.json").write_text("{}")
    assert Tokenizer(model).render(QUESTION) == expected


def test_a_tokenizer_that_transformers_takes_for_another_kind_is_refused(folder: Path, tmp_path: Path) -> None:
    model = _with_template(folder, tmp_path, "{{ messages[0].content }}")
    config = json.loads((model / "tokenizer_config.json").read_text())
    # As DeepSeek-R1-Distill-Llama has it, whose tokenizer.json is of bytes.
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "LlamaTokenizerFast"}))
    with pytest.raises(ModelError, match=r"as a LlamaTokenizer, which turns 'Hello world,\\n2 \+ 3\?' into") as refused:
        Tokenizer(model)
    assert "PreTrainedTokenizerFast" in refused.value.hint
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert Tokenizer(model).decode(Tokenizer(model).render(QUESTION)) == QUESTION[0]["content"]


def test_a_scan_is_of_all_files_of_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    model = _with_template(folder, tmp_path, "{{ messages[0].content }}")
    before = template_digest(Tokenizer(model))
    assert template_digest(Tokenizer(model)) == before
    (model / "special_tokens_map.json").write_text("{}")
    assert template_digest(Tokenizer(model)) != before


def test_a_tokenizer_in_python_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    model = _with_template(folder, tmp_path, "{{ messages[0].content }}")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CTRLTokenizer"}))
    (model / "vocab.json").write_text(json.dumps({"<unk>": 0, "a</w>": 1}))
    (model / "merges.txt").write_text("#version: 0.2\na </w>\n")
    with pytest.raises(ModelError, match=r"is a CTRLTokenizer, which has no form as tokenizer\.json"):
        Tokenizer(model)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load a tokenizer from"):
        Tokenizer(tmp_path)


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_are_shown_by_templates_that_know_them(folder: Path, tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}{% endfor %}"
    )
    templated_tokenizer = Tokenizer(_with_template(folder, tmp_path, template))
    assert templated_tokenizer.decode(templated_tokenizer.render(QUESTION, tools=[ADD])) == "[add]What is 2+3?"


def test_tools_are_text_for_templates_that_know_none(tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(tokenizer.render(QUESTION, tools=[ADD]), skip_special=False)
    assert text.startswith("<|im_start|>system\n# Tools")
    assert json.dumps(ADD) in text
    call_message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"x": 1}}}],
    }
    text = tokenizer.decode(
        tokenizer.render([*QUESTION, call_message], add_generation_prompt=False), skip_special=False
    )
    assert '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>' in text


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_LAST_END = CHATML.replace("<|im_end|>\n{% endfor", "{{ '<|im_end|>\n' if not loop.last }}{% endfor").replace(
    "{% if add_generation_prompt %}", "{% if add_generation_prompt %}<|im_end|>\n"
)
RETURNS = CHATML.replace(
    "<|im_end|>",
    "{{ '<|endoftext|>' if m.role == 'assistant' and loop.last and not add_generation_prompt else '<|im_end|>' }}",
)


@pytest.mark.parametrize(
    ("template", "configured", "added", "stops"),
    [
        (CHATML, 2, None, (2,)),
        (CHATML, 0, 2, (0, 2)),  # as some base models
        (WITHOUT_LAST_END, 0, 2, (0, 2)),  # as GLM-4
        (RETURNS, 0, None, (0,)),  # as gpt-oss, whose <|end|> also ends thoughts
        ("{% for m in messages %}{{ m.content }}{% endfor %}", 0, None, (0,)),
    ],
)
def test_the_templates_end_of_turn_is_a_stop_token(folder: Path, tmp_path: Path, template, configured, added, stops):
    tokenizer = _with_eos(folder, tmp_path, template, configured)
    assert (tokenizer.added_stop, tokenizer.stop_ids) == (added, stops)
    assert bool(describe_added_stop(tokenizer)) == (added is not None)
    exported = tmp_path / "exported"
    exported.mkdir()
    name_added_stop(tmp_path, exported)
    config_file = exported / "generation_config.json"
    assert (json.loads(config_file.read_text()) if config_file.exists() else None) == (
        None if added is None else {"eos_token_id": list(stops)}
    )


def _with_eos(folder: Path, target: Path, template: str, eos: int) -> Tokenizer:
    """A folder of which each setting names one token that ends text."""
    _with_template(folder, target, template)
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((target / name).read_text())
        key, value = (
            ("eos_token_id", eos) if name == "config.json" else ("eos_token", ["<|endoftext|>", "", "<|im_end|>"][eos])
        )
        (target / name).write_text(json.dumps(settings | {key: value}))
    return Tokenizer(target)


@pytest.mark.parametrize(
    ("template", "configured", "stop"), [(CHATML, 0, 0), (CHATML, 0, 2), (CHATML, 2, 2), (RETURNS, 0, 0)]
)
def test_a_history_has_one_end_a_turn_the_templates(folder: Path, tmp_path: Path, template, configured, stop):
    tokenizer = _with_eos(folder, tmp_path, template, configured)
    answer, reply = {"role": "assistant", "content": "5"}, {"role": "user", "content": "Sure?"}
    turn = (*tokenizer.render(QUESTION), *tokenizer.encode("5"), stop)
    assert tuple(tokenizer.extend(turn, [reply])) == tokenizer.render([*QUESTION, answer, reply])


def test_an_answer_is_trained_with_an_end_that_the_template_leaves_out(folder: Path, tmp_path: Path) -> None:
    tokenizer = _with_eos(folder, tmp_path, WITHOUT_LAST_END, 0)
    task = Task(id="1", source="s", messages=QUESTION, truth={"answer": "5"})
    (episode,) = conversation_episodes(task, tokenizer)
    assert tokenizer.decode(episode.turns[0].token_ids, skip_special=False) == "5<|im_end|>"
