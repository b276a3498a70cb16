"""IFEval's instructions: each of the 25 kinds on texts that follow it and texts that do not, and hostile answers."""

from __future__ import annotations

import time

import pytest

from forge_rl.errors import TaskError
from forge_rl.harness.ifeval import CHECKS, IFEval, count_sentences, follows
from forge_rl.types import Task

ENGLISH = "the cat and the dog are in the house and it is not for you"
CASES: list[tuple[str, dict[str, object], list[str], list[str]]] = [
    (
        "keywords:existence",
        {"keywords": ["Sun", "moon"]},
        ["The sun and the MOON."],
        ["The sun.", "none of them"],
    ),
    (
        "keywords:frequency",
        {"keyword": "hop", "frequency": 2, "relation": "at least"},
        ["Hop, hop."],
        ["hop"],
    ),
    ("keywords:frequency", {"keyword": "hop", "frequency": 2, "relation": "less than"}, ["hop"], ["hop hop"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["a category"], ["The Cat.", "cat"]),
    (
        "keywords:letter_frequency",
        {"letter": "Q", "let_frequency": 3, "let_relation": "at least"},
        ["qQq"],
        ["qq"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 1, "let_relation": "less than"},
        ["none"],
        ["a # sign"],
    ),
    (
        "language:response_language",
        {"language": "de"},
        ["Das ist nicht der Hund und die Katze, sondern ein Pferd, das auf dem Feld steht."],
        [ENGLISH],
    ),
    ("language:response_language", {"language": "kn"}, ["ಕನ್ನಡ ಒಂದು ಭಾಷೆ"], [ENGLISH, "हिन्दी"]),
    ("language:response_language", {"language": "hi"}, ["हिन्दी एक भाषा है"], ["ಕನ್ನಡ"]),
    ("language:response_language", {"language": "ja"}, ["これは日本語の文です"], [ENGLISH]),
    ("language:response_language", {"language": "en"}, [ENGLISH], ["el perro y la casa no es de los gatos que se van"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        ["One. Two! Three?", "Dr. Who came. He left. No way"],
        ["Dr. Who came at 3.5 p.m. He left."],
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["One."], ["One. Two."]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "***\none\n***\ntwo\n***"],
        ["one\n\ntwo", "one *** *** two", "one"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one two three"], ["one two"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Rain"},
        ["It is.\n\nRain, rain.", "It is.\n\n'rain' falls"],
        ["Rain.\n\nIt is.", "It is.\n\nRain.\n\nThree.", "Rain"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["Dear [name], of [address]"],
        ["Dear [name]", "[a\nb] [c"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. more", "bye p. s. more"],
        ["Bye. PS more"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Bye.\nP.P.S more"], ["P.S. more"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* one\n* two", "- one\n  - two", "* one\ntext\n- two"],
        ["* one", "* one\n* two\n* three", "**bold**\n* one"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["Well: My answer is maybe."],
        ["My answer is perhaps.", "my answer is yes."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one** and **two**"],
        ["*one*", "* *  and ** **", "*one\ntwo*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1\na", "Section 1 Section 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1, 2]}', '```json\n{"a": 1}\n```', "3"],
        ["{a: 1}", 'Here: {"a": 1}', "[" * 100_000],
    ),
    ("detectable_format:title", {}, ["<<Poem>>\nRoses"], ["<< >>", "<Poem>", "<<Poem\n>>"]),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo"],
        ["one", "one ****** one", "one ****** ****** two", "a ****** b ****** c"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem."},
        ["write a poem.\n\nRoses"],
        ["Roses. Write a poem."],
    ),
    ("startend:end_checker", {"end_phrase": "The end."}, ["So. the end.", '"So. The end."'], ["The end. Or not"]),
    ("startend:quotation", {}, ['"So"', ' "So" '], ['"', "So", '"So" he said']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["GO and STOP"],
        ["GO and Stop"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 1, "capital_relation": "less than"},
        ["Go and stop"],
        ["A cat"],
    ),
    ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, "DER HUND UND DIE KATZE SIND NICHT IN DEM HAUS"]),
    ("change_case:english_lowercase", {}, [ENGLISH], [ENGLISH.title(), "der hund und die katze sind nicht im haus"]),
    ("punctuation:no_comma", {}, ["one and two"], ["one, two"]),
]


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES)
def test_an_instruction_is_followed_or_not(
    name: str, arguments: dict[str, object], right: list[str], wrong: list[str]
) -> None:
    for text in right:
        assert follows(name, arguments, text), text
    for text in [*wrong, "", "  \n"]:
        assert not follows(name, arguments, text), text


def test_every_kind_is_tested() -> None:
    assert {name for name, *_ in CASES} == {*CHECKS}
    assert len(CHECKS) == 25


def scored(text: str, *instructions: tuple[str, dict[str, object]], **options: bool) -> tuple[float, float, float]:
    truth = {
        "instruction_id_list": [name for name, _ in instructions],
        "kwargs": [arguments for _, arguments in instructions],
    }
    score = IFEval(**options)(Task(id="1000", source="ifeval", messages=(), truth=truth), text)
    return score.total, score.parts["instructions"], score.parts["loose"]


def test_all_instructions_count_strictly_and_loosely() -> None:
    no_comma: tuple[str, dict[str, object]] = ("punctuation:no_comma", {"keyword": None})
    quoted: tuple[str, dict[str, object]] = ("startend:quotation", {})
    assert scored('"So be it"', no_comma, quoted) == (1.0, 1.0, 1.0)
    assert scored('"So, be it"', no_comma, quoted) == (0.0, 0.5, 0.0)
    assert scored('"So, be it"', no_comma, quoted, partial=True)[0] == 0.5
    assert scored('Sure, here it is:\n"So be it"', no_comma, quoted) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        ([("keywords:existance", {})], "existance"),
        ([("keywords:existence", {})], "KeyError"),
        ([("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "about"})], "the relation is 'about'"),
        ([("language:response_language", {"language": "tlh"})], "the language 'tlh'"),
        ([("keywords:forbidden_words", {"forbidden_words": "cat"})], "not a list of texts"),
        ([("length_constraints:number_words", {"num_words": 1e999, "relation": "at least"})], "OverflowError"),
        ([("punctuation:no_comma", "none")], "has 'none': ValueError"),
        ([(["punctuation:no_comma"], {})], r"the instruction \['punctuation:no_comma'\]"),
        ([], "has no instructions"),
    ],
)
def test_rows_without_their_parameters_are_one_clear_message(
    instructions: list[tuple[str, dict[str, object]]], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        scored("one, two", *instructions)


def test_sentences_end_where_readers_end_them() -> None:
    assert count_sentences("It costs 3.5 dollars, e.g. here. Yes") == 2
    assert count_sentences("1. First\n2. Second") == 1
    assert count_sentences("What?! No... Yes.") == 3
    assert count_sentences("これは文です。 もう一つ。") == 2


@pytest.mark.parametrize("text", ["." * 200_000 + "x", "[" * 200_000, "<<" * 100_000, "* " * 100_000, "Mr. " * 50_000])
def test_hostile_answers_take_linear_time(text: str) -> None:
    begun = time.process_time()
    for name, arguments, *_ in CASES:
        follows(name, arguments, text)
    assert time.process_time() - begun < 10.0, "a quadratic check takes minutes"
