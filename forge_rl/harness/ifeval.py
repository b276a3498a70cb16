"""Reward for instruction following: checks of IFEval's 25 kinds of instructions (https://arxiv.org/abs/2311.07911).

Texts are long and hostile: every check takes linear time, and patterns of a data set are compared as plain text. Where
Google's reference asks nltk or langdetect, which need downloads or are random, sentences, words and languages are found
by the rules below.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forge_rl.errors import TaskError
from forge_rl.flags.texts import suggest
from forge_rl.rewards.protocol import TextReward
from forge_rl.system.strict_json import parse_json
from forge_rl.types import Score, Task

_LONGEST = 200_000
"""Characters of an answer that are checked."""
_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_STOPS = r".!?\u3002\uff01\uff1f\u0964"
# Possessive quantifiers: a row of a million full stops must not make the search quadratic.
_END = re.compile(rf"(?<![{_STOPS}])[{_STOPS}]++[\"'\u201d\u2019)\]]*+(?=\s|$)")
_ABBREVIATIONS = frozenset(
    ("mr", "mrs", "ms", "dr", "prof", "sr", "jr", "st", "vs", "etc", "e.g", "i.e", "u.s", "a.m", "p.m", "inc", "ltd")
)
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_SCRIPTS = {
    "ar": "ARABIC", "fa": "ARABIC", "ur": "ARABIC", "bn": "BENGALI", "bg": "CYRILLIC", "el": "GREEK", "gu": "GUJARATI",
    "he": "HEBREW", "hi": "DEVANAGARI", "ja": "CJK", "kn": "KANNADA", "ko": "HANGUL", "ml": "MALAYALAM",
    "mr": "DEVANAGARI", "ne": "DEVANAGARI", "pa": "GURMUKHI", "ru": "CYRILLIC", "ta": "TAMIL", "te": "TELUGU",
    "th": "THAI", "uk": "CYRILLIC", "zh": "CJK",
}  # fmt: skip
"""Scripts of languages that are not written in Latin letters; languages that share a script are not told apart."""
_FUNCTION_WORDS = {
    "en": "the of and to in is that it for was with as on are this be you have not",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es",
    "es": "de la que el en y los se del las un por con una su para es al lo como más pero",
    "fr": "de la le et les des en un du une que est pour qui dans par sur au pas plus ce il elle",
    "it": "di e il che la è per un in una sono non le si da con come anche del della gli ma",
    "pt": "de a o que e do da em um para é com não uma os no se na por mais as dos como mas",
    "nl": "de het een en van ik te dat die in is niet op aan met voor zijn er maar om",
    "fi": "ja on ei se että hän oli mutta tämä kun niin ole joka myös sen mitä kuin ovat olla",
    "sv": "och det att i en jag som på är av för med till den har inte om ett men",
    "vi": "và của là có không được cho một các trong người với những này để khi đã từ như",
    "sw": "ya na wa kwa ni katika za la kuwa hii ambayo kama si yake hiyo pia kila watu",
    "tr": "ve bir bu da de için ile çok ama olarak daha ne gibi var o en kadar sonra",
    "pl": "i w na z się nie do to że jest o jak ale po co dla od tak przez",
    "id": "yang dan di untuk dengan ini itu dari tidak dalam pada adalah akan ke saya bisa juga",
}
"""Frequent words of languages in Latin letters."""

Check = Callable[[str, Mapping[str, Any]], bool]


@dataclass(frozen=True, kw_only=True)
class IFEval(TextReward):
    """Scores 1.0 if an answer follows all instructions of its prompt, as IFEval's strict accuracy.

        --reward ifeval

    The truth has the columns of google/IFEval: `instruction_id_list`, such as ["punctuation:no_comma"], and `kwargs`,
    an object for each. Parts: `instructions`, the share that is followed, and `loose`, 1.0 if all are after the first
    line, the last line, both, or asterisks are removed.
    """

    partial: bool = False
    """Score the share of instructions that are followed."""

    def __call__(self, task: Task, text: str) -> Score:
        """Raises TaskError for a task without instructions, or with an unknown one."""
        instructions, text = _instructions(task), text[:_LONGEST]
        failed_names = [name for name, parameters in instructions if not follows(name, parameters, text)]
        share = 1 - len(failed_names) / len(instructions)
        loose = all(
            any(follows(name, parameters, variant) for variant in _loosened(text)) for name, parameters in instructions
        )
        feedback = f"not followed: {', '.join(failed_names)}" if failed_names else ""
        total = share if self.partial else float(not failed_names)
        return Score(total=total, parts={"instructions": share, "loose": float(loose)}, feedback=feedback)


def follows(name: str, parameters: Mapping[str, Any], text: str) -> bool:
    """Return whether a text follows one instruction: `follows("punctuation:no_comma", {}, "So")`.

    Raises:
        KeyError, ValueError, TypeError: the instruction lacks a parameter, or a parameter has a wrong type.
    """
    return bool(text.strip()) and CHECKS[name](text, parameters)


def _instructions(task: Task) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and parameters of a task's instructions, checked by one trial each."""
    names, kwargs_list = task.truth.get("instruction_id_list"), task.truth.get("kwargs")
    if not isinstance(names, list) or not isinstance(kwargs_list, list) or not names or len(names) != len(kwargs_list):
        raise TaskError(
            f"--reward ifeval: task {task.id!r} of {task.source!r} has no instructions",
            hint="its rows need instruction_id_list and kwargs, lists of the same length, as google/IFEval has",
        )
    instructions: list[tuple[str, Mapping[str, Any]]] = []
    for name, kwargs in zip(names, kwargs_list, strict=True):
        if not isinstance(name, str) or name not in CHECKS:
            hint = suggest(str(name), CHECKS, "instructions")
            raise TaskError(f"--reward ifeval: task {task.id!r} has the instruction {name!r:.80}", hint=hint)
        try:
            # The data set's columns hold every parameter of every instruction, null where it does not apply.
            parameters = {key: value for key, value in dict(kwargs or {}).items() if value is not None}
            # A wrong parameter is the data's fault, and must not first show as a wrong answer.
            follows(name, parameters, "one. two.")
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise TaskError(
                f"--reward ifeval: {name} of task {task.id!r} has {kwargs!r:.80}: {error!r}",
                hint="give the parameters that google/IFEval has",
            ) from error
        instructions.append((name, parameters))
    return instructions


def _loosened(text: str) -> list[str]:
    """Return the texts of the loose accuracy: without the first line, the last, both, and each without asterisks."""
    lines = text.split("\n")
    texts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return texts + [variant.replace("*", "") for variant in texts]


def _compared(count: int, relation: object, limit: object) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"the relation is {relation!r}")
    return count < int(limit) if relation == "less than" else count >= int(limit)  # type: ignore[call-overload,no-any-return]


def _strings(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise TypeError(f"{value!r:.40} is not a list of texts")
    return value


def _existence(text: str, parameters: Mapping[str, Any]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in _strings(parameters["keywords"]))


def _frequency(text: str, parameters: Mapping[str, Any]) -> bool:
    count = text.lower().count(_strings([parameters["keyword"]])[0].lower())
    return _compared(count, parameters["relation"], parameters["frequency"])


def _forbidden(text: str, parameters: Mapping[str, Any]) -> bool:
    # Whole words only, while keywords above also count inside of words: both as in the reference.
    words = _strings(parameters["forbidden_words"])
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in words)


def _letters(text: str, parameters: Mapping[str, Any]) -> bool:
    letter = _strings([parameters["letter"]])[0].lower()
    return _compared(text.lower().count(letter), parameters["let_relation"], parameters["let_frequency"])


def _language(text: str, parameters: Mapping[str, Any]) -> bool:
    return _is_in(text, _strings([parameters["language"]])[0])


def _is_in(text: str, language: str) -> bool:
    """Return whether a text is in a language, by the script of most letters, and by its most frequent words."""
    language = language.lower().partition("-")[0]
    if language not in _SCRIPTS and language not in _FUNCTION_WORDS:
        raise ValueError(f"the language {language!r} is not known")
    # A letter's script is the first word of its Unicode name, as in LATIN SMALL LETTER A.
    letters = Counter(
        "CJK" if name.split(" ")[0] in ("CJK", "HIRAGANA", "KATAKANA") else name.split(" ")[0]
        for letter in text
        if letter.isalpha() and (name := unicodedata.name(letter, ""))
    )
    script = max(letters, key=lambda name: letters[name], default="")
    if language in _SCRIPTS:
        return script == _SCRIPTS[language]
    words = Counter(word.lower() for word in _WORD.findall(text))
    # Languages in Latin letters are told apart by their most frequent words.
    frequencies = {
        code: sum(words[word] for word in function_words.split()) for code, function_words in _FUNCTION_WORDS.items()
    }
    return script == "LATIN" and (frequencies[language] == max(frequencies.values()))


def _sentences(text: str, parameters: Mapping[str, Any]) -> bool:
    return _compared(count_sentences(text), parameters["relation"], parameters["num_sentences"])


def count_sentences(text: str) -> int:
    """Count sentences: ends with a full stop, question or exclamation mark before a blank, not after an abbreviation or
    a number of a list; text after the last end is one too."""
    count, begin = 0, 0
    for end in _END.finditer(text):
        # `begin` stays where it is after an abbreviation: without the limit of 40, a text of nothing else would take
        # quadratic time.
        before = text[max(begin, end.start() - 40) : end.start()]
        word = before.split()[-1].lower().lstrip("(\"'") if before.strip() else ""
        is_listed = word.isdecimal() and before.rpartition("\n")[2].strip() == word
        if end.group()[0] == "." and (word in _ABBREVIATIONS or is_listed):
            continue
        if word:
            count, begin = count + 1, end.end()
    return count + bool(_WORD.search(text, begin))


def _paragraphs(text: str, parameters: Mapping[str, Any]) -> bool:
    # A divider may also stand before the first paragraph or after the last one, as in the reference.
    parts = [part.strip() for part in text.split("***")]
    paragraphs = parts[1 if not parts[0] else 0 : len(parts) - (len(parts) > 1 and not parts[-1])]
    return all(paragraphs) and len(paragraphs) == int(parameters["num_paragraphs"])


def _words(text: str, parameters: Mapping[str, Any]) -> bool:
    return _compared(len(_WORD.findall(text)), parameters["relation"], parameters["num_words"])


def _nth_paragraph(text: str, parameters: Mapping[str, Any]) -> bool:
    parts = text.split("\n\n")
    # Empty paragraphs count for the place, but not for the number, as in the reference.
    count, place = sum(bool(part.strip()) for part in parts), int(parameters["nth_paragraph"])
    expected_word = _strings([parameters["first_word"]])[0].lower()
    if not 1 <= place <= len(parts) or not (words := parts[place - 1].split()):
        return False
    first = words[0].lstrip("'\"").lower()
    word = re.split(r"[.,?!'\"]", first, maxsplit=1)[0]
    return count == int(parameters["num_paragraphs"]) and word == expected_word


def _placeholders(text: str, parameters: Mapping[str, Any]) -> bool:
    count = 0
    for line in text.split("\n"):
        end = 0
        # By `find` instead of a pattern, which would take quadratic time on a line of opening brackets.
        while (begin := line.find("[", end)) >= 0 and (close_index := line.find("]", begin)) >= 0:
            count, end = count + 1, close_index + 1
    return count >= int(parameters["num_placeholders"])


def _postscript(text: str, parameters: Mapping[str, Any]) -> bool:
    marker = _strings([parameters["postscript_marker"]])[0]
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()) is not None


def _bullets(text: str, parameters: Mapping[str, Any]) -> bool:
    lines = [line.lstrip() for line in text.split("\n")]
    # A line that begins with two stars is bold text, not an item.
    count = sum(line.startswith("-") or (line.startswith("*") and line[1:2] not in ("", "*")) for line in lines)
    return count == int(parameters["num_bullets"])


def _constrained(text: str, parameters: Mapping[str, Any]) -> bool:
    return any(answer in text for answer in _ANSWERS)


def _highlights(text: str, parameters: Mapping[str, Any]) -> bool:
    # Both forms count, as in the reference.
    single, double = re.findall(r"\*([^\n*]*)\*", text), re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(highlight.strip()) for highlight in (*single, *double)) >= int(parameters["num_highlights"])


def _sections(text: str, parameters: Mapping[str, Any]) -> bool:
    name = re.escape(_strings([parameters["section_spliter"]])[0].strip())
    return len(re.findall(rf"{name}\s?\d+", text)) >= int(parameters["num_sections"])


def _json(text: str, parameters: Mapping[str, Any]) -> bool:
    # The answer may be in a fenced block, under one of the reference's spellings of the language.
    contents = text.strip()
    for mark in ("```json", "```Json", "```JSON", "```"):
        contents = contents.removeprefix(mark)
    try:
        parse_json(contents.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str, parameters: Mapping[str, Any]) -> bool:
    for line in text.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end and line[begin:end].strip("< >"):
            return True
    return False


def _two_responses(text: str, parameters: Mapping[str, Any]) -> bool:
    parts = [part.strip() for part in text.split("******")]
    # Empty parts are ignored at both ends, but between dividers they count as an empty answer.
    responses = [part for place, part in enumerate(parts) if part or 0 < place < len(parts) - 1]
    return len(responses) == 2 and all(responses) and responses[0] != responses[1]


def _repeat(text: str, parameters: Mapping[str, Any]) -> bool:
    return text.strip().lower().startswith(_strings([parameters["prompt_to_repeat"]])[0].strip().lower())


def _ends(text: str, parameters: Mapping[str, Any]) -> bool:
    return text.strip().strip('"').lower().endswith(_strings([parameters["end_phrase"]])[0].strip().lower())


def _quoted(text: str, parameters: Mapping[str, Any]) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(text: str, parameters: Mapping[str, Any]) -> bool:
    count = sum(word.isupper() for word in _TOKEN.findall(text))
    return _compared(count, parameters["capital_relation"], parameters["capital_frequency"])


def _upper(text: str, parameters: Mapping[str, Any]) -> bool:
    return text.isupper() and _is_in(text, "en")


def _lower(text: str, parameters: Mapping[str, Any]) -> bool:
    return text.islower() and _is_in(text, "en")


def _no_comma(text: str, parameters: Mapping[str, Any]) -> bool:
    return "," not in text


CHECKS: Mapping[str, Check] = {
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _upper,
    "change_case:english_lowercase": _lower,
    "combination:repeat_prompt": _repeat,
    "combination:two_responses": _two_responses,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:json_format": _json,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:title": _title,
    "keywords:existence": _existence,
    "keywords:forbidden_words": _forbidden,
    "keywords:frequency": _frequency,
    "keywords:letter_frequency": _letters,
    "language:response_language": _language,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_words": _words,
    "punctuation:no_comma": _no_comma,
    "startend:end_checker": _ends,
    "startend:quotation": _quoted,
}
"""Checks of a text by the instruction's name in google/IFEval, with its parameters there."""
