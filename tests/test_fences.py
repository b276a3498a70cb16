"""Code in Markdown fences, as models write them."""

import pytest

from forge_rl.sandbox.fences import PYTHON, fenced_code, last_code
from forge_rl.sandbox.languages import LANGUAGES


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("Try this:\n```python\nprint(1)\n```\nor\n~~~\nprint(2)\n~~~", ["print(1)", "print(2)"]),
        ('```python title="main.py"\nx\n```', ["x"]),
        ("``` Py {linenos}\r\nx\r\n```", ["x"]),
        ("```rust title=python\nx\n```", []),
        ("```print(1)``` prints.\n```python\nx\n```", ["x"]),
        ("~~~python `a`\nx\n~~~", ["x"]),
        ("```python\nx = '\u2028\x0c\x85'\n```", ["x = '\u2028\x0c\x85'"]),
        ("````python\n```\nx\n````", ["```\nx"]),
        ("```python\nx\n``` and\ny", ["x\n``` and\ny"]),
        ("```python\nx\n", ["x"]),
    ],
)
def test_blocks_are_those_that_markdown_shows(text: str, blocks: list[str]):
    assert fenced_code(text) == blocks


def test_text_without_a_block_is_code_and_text_with_blocks_of_other_languages_alone_is_none():
    assert last_code("x = 1\n") == "x = 1\n"
    assert last_code("```x``` is\nall") == "```x``` is\nall"
    assert last_code("```rust\nx\n```") is None
    assert last_code("```py\n1\n```\n```text\n2\n```", PYTHON) == "1"


@pytest.mark.parametrize(("language", "fence"), [("shell", "bash"), ("c++", "cpp"), ("go", "golang"), ("c", "c")])
def test_a_language_is_known_by_the_names_that_models_write(language: str, fence: str):
    assert fenced_code(f"```{fence}\nx\n```", LANGUAGES[language].fences) == ["x"]
