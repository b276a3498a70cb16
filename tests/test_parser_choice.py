"""The parsers of calls and thoughts that are chosen for a chat template, by reading back what it writes."""

from pathlib import Path

import pytest

from forge_rl.errors import ConfigError
from forge_rl.tokens.parser_choice import samples_of_calls
from forge_rl.tokens.template_args import read_template_args
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.tokens.tool_parsers import parser_for, reasoning_parser_for
from tests.test_thoughts import CHATML, OPENS, tokenizer_with

TOOLS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
OBJECT = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
PYTHONIC = (
    "{{ c.function.name }}({% for p in c.function.arguments %}{{ p }}={{ c.function.arguments[p] | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %})"
)
GEMMA = (
    "call:{{ c.function.name }}{{ '{' }}{% for p, v in c.function.arguments.items() %}{{ p }}:{% if v is string %}"
    "<|\"|>{{ v }}<|\"|>{% else %}{{ v }}{% endif %}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
)
SEED = (
    "<function={{ c.function.name }}>\n{% for p, v in c.function.arguments.items() %}<parameter={{ p }}>{{ v }}"
    "</parameter>\n{% endfor %}</function>\n"
)
MINICPM = (
    '<function name="{{ c.function.name }}">{% for p, v in c.function.arguments.items() %}<param name="{{ p }}">{{ v }}'
    "</param>{% endfor %}</function>"
)
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"


def with_calls(before: str, call: str, after: str, *, between: str = "", around: tuple[str, str] = ("", "")) -> str:
    """A template that writes calls so, after the content, or instead of it if they are a list."""
    calls = f"{before}{call}{after}{{{{ {between!r} if not loop.last }}}}"
    calls_text = f"{around[0]}{{% for c in m.tool_calls %}}{calls}{{% endfor %}}{around[1]}"
    content = f"{THOUGHT}{{{{ m.content }}}}{{% if m.tool_calls %}}{calls_text}{{% endif %}}"
    if around[0] == "[":  # as Llama 3.2, which writes calls alone
        content = f"{{% if m.tool_calls %}}{calls_text}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    return TOOLS + CHATML.replace("{{ m.content }}", content)


PROPERTIES = (
    "{% for t in tools %}{{ t.function.name }}{% for p, v in t.function.parameters.properties.items() %} {{ p }}: "
    "{{ v.type }}{% endfor %}\n{% endfor %}"
)
"""Reads what a tool may lack, and tools where there are none, as templates of Seed-OSS and Hermes 3 do."""


@pytest.mark.parametrize(
    ("template", "parser_name"),
    [
        (CHATML, "hermes"),  # no tools: they are written in Hermes' format
        (with_calls("<tool_call>\n", OBJECT, "\n</tool_call>"), "hermes"),
        (with_calls("", PYTHONIC, "", between=", ", around=("[", "]")), "pythonic"),  # Llama 3.2
        (with_calls("", OBJECT, "", between=", ", around=("<TOOLCALL>[", "]</TOOLCALL>")), None),  # Nemotron
    ],
)
def test_the_tool_parser_reads_back_what_the_template_writes(
    small_tokenizer: Path, tmp_path: Path, template: str, parser_name: str | None
) -> None:
    tokenizer = tokenizer_with(small_tokenizer, tmp_path, template)
    if parser_name is not None:
        assert parser_for(tokenizer) == parser_name
        return
    with pytest.raises(ConfigError, match=r"(?s)none of vLLM's tool parsers reads.*<TOOLCALL>.*set --tool-parser"):
        parser_for(tokenizer)


@pytest.mark.parametrize(
    ("template", "tokens", "parser"),
    [
        (PROPERTIES + with_calls("<tool_call>\n", OBJECT, "\n</tool_call>").removeprefix(TOOLS), (), "hermes"),
        (
            with_calls("<seed:tool_call>\n", SEED, "</seed:tool_call>"),
            ("<seed:tool_call>", "</seed:tool_call>"),
            "seed_oss",
        ),
    ],
)
def test_templates_that_read_all_of_a_tool_are_asked_with_a_whole_one(
    small_tokenizer: Path, tmp_path: Path, template: str, tokens: tuple[str, ...], parser: str
) -> None:
    tokenizer = tokenizer_with(small_tokenizer, tmp_path, template, tags=tokens)
    assert tokenizer.shows_tools
    assert parser_for(tokenizer) == parser


@pytest.mark.parametrize(
    ("template", "tokens", "parser"),
    [
        (with_calls("<|tool_call>", GEMMA, "<tool_call|>"), ("<|tool_call>", "<tool_call|>", '<|"|>'), "gemma4"),
        (with_calls("", MINICPM, ""), ("<function", "</function>", "<param", "</param>"), "minicpm5"),
    ],
)
def test_a_parser_that_drops_text_next_to_calls_is_found_by_the_templates_marker_alone(
    small_tokenizer: Path, tmp_path: Path, template: str, tokens: tuple[str, ...], parser: str
) -> None:
    after = template.replace("{{ m.content }}{% if m.tool_calls %}", "{% if m.tool_calls %}").replace(
        "{% endfor %}{% endif %}", "{% endfor %}{% endif %}{{ m.content }}"
    )
    tokenizer = tokenizer_with(small_tokenizer, tmp_path, after if parser == "gemma4" else template, tags=tokens)
    assert len(samples_of_calls(tokenizer)) == 3
    assert any(sample.content for sample in samples_of_calls(tokenizer))
    assert parser_for(tokenizer) == parser


@pytest.mark.parametrize(
    ("template", "tags", "parser_name"),
    [
        (CHATML, (), ""),
        (OPENS, ("<think>", "</think>"), "deepseek_r1"),
        (with_calls("<tool_call>\n", OBJECT, "\n</tool_call>"), ("<think>", "</think>"), "deepseek_r1"),
        (CHATML + "{# <mm:think> #}", ("<mm:think>", "</mm:think>"), "minimax_m3"),
        (OPENS.replace("<think>", "◁think▷") + "{# ◁/think▷ #}", (), None),
    ],
)
def test_the_reasoning_parser_reads_back_thoughts(
    small_tokenizer: Path, tmp_path: Path, template: str, tags, parser_name: str | None
) -> None:
    tokenizer = tokenizer_with(small_tokenizer, tmp_path, template, tags=tags)
    if parser_name is not None:
        assert reasoning_parser_for(tokenizer, "hermes") == parser_name
        return
    with pytest.raises(
        ConfigError, match=r"(?s)none of vLLM's reasoning parsers reads.*--gateway.reasoning-parser.*none"
    ):
        reasoning_parser_for(tokenizer, "hermes")


def test_variables_of_the_template_hold_for_all_conversations(small_tokenizer: Path, tmp_path: Path) -> None:
    template = CHATML.replace("assistant\n{%", "assistant\n{{ '' if enable_thinking|default(true) else 'no' }}{%")
    tokenizer_with(small_tokenizer, tmp_path, template)
    args = read_template_args(["enable_thinking=false"])
    tokenizer, question = Tokenizer(tmp_path, template_args=args), [{"role": "user", "content": "?"}]
    assert tokenizer.decode(tokenizer.render(question)).endswith("assistant\nno")
    assert tokenizer.decode(tokenizer.render(question, settings={"enable_thinking": True})).endswith("assistant\n")
    with pytest.raises(ConfigError, match="sets effort, which the model's chat template does not use"):
        Tokenizer(tmp_path, template_args={"effort": "high"})
    with pytest.raises(ConfigError, match="sets im_start"):  # text of the template, and none of its variables
        Tokenizer(tmp_path, template_args={"im_start": 1})
    for text in ("enable_thinking", "messages=[]", "eos_token=a"):
        with pytest.raises(ConfigError, match="--template-args"):
            read_template_args([text])
