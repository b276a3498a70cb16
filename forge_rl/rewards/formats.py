"""Rewards of a completion's form: tags in their order, a regular expression, JSON of a schema."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_rl.errors import ConfigError, check_flags
from forge_rl.types import Score, Task

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n\s*```", flags=re.DOTALL)
_MOST_JSON = 100_000
"""Length of the longest text that is read as JSON."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """Scores 1.0 for `<think>...</think><answer>...</answer>`: each tag once, in this order, nothing beside them.

    Format()(task, "<think>2 and 3</think> <answer>5</answer>")  # Score(total=1.0, answer="5")
    """

    think: str = "think"
    """Name of the first tag; "" for none."""
    answer: str = "answer"
    """Name of the second tag."""
    opened: bool = False
    """The chat template opens the first tag itself, so that completions begin within it."""

    def __post_init__(self) -> None:
        if not self.answer:
            raise ConfigError("--reward format: answer is empty", hint="name the tag of the answer")

    def __call__(self, task: Task, text: str) -> Score:
        """Return 1.0 or 0.0, and the inside of the answer's tag."""
        rest = f"<{self.think}>{text}" if self.opened and self.think else text
        names = [name for name in (self.think, self.answer) if name]
        once = all(rest.count(f"<{name}>") == rest.count(f"</{name}>") == 1 for name in names)
        inside = ""
        for name in names if once else ():
            before, _, rest = rest.partition(f"<{name}>")
            inside, closed, rest = rest.partition(f"</{name}>")
            once = once and bool(closed) and not before.strip()
        return Score(total=1.0, answer=inside.strip()) if once and not rest.strip() else Score(total=0.0)


@dataclass(frozen=True, kw_only=True)
class Regex:
    """Scores 1.0 where a regular expression is found in the completion; its group `answer`, or else its first group, is
    the answer.

    --reward 'regex:pattern="^The answer is (\\d+)[.]$"'

    A search that takes too long, as some patterns do on some texts, scores 0.0.
    """

    pattern: str
    """Regular expression, in the syntax of Python's `re`; in quotes if it has a comma or ends in a star and a number.
    Add (?s) to let . match new lines, (?i) to ignore case."""
    full: bool = False
    """The whole completion must match."""
    timeout_s: float = 1.0
    """Longest time for one completion."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward regex:", above={"timeout_s": 0})
        import regex  # type: ignore[import-untyped]

        try:
            _compiled(self.pattern)
        except regex.error as error:
            raise ConfigError(
                f"--reward regex: {self.pattern!r} is no regular expression: {error}", hint="mend the pattern"
            ) from None

    def __call__(self, task: Task, text: str) -> Score:
        """Return 1.0 or 0.0."""
        search = getattr(_compiled(self.pattern), "fullmatch" if self.full else "search")
        try:
            found = search(text, timeout=self.timeout_s)
        except TimeoutError:
            found = None
        if found is None:
            return Score(total=0.0)
        named = found.groupdict().get("answer")
        return Score(total=1.0, answer=named or (found.group(1) if found.re.groups else None) or "")


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> Any:
    import regex  # unlike `re`, it can stop

    return regex.compile(pattern)


@dataclass(frozen=True, kw_only=True)
class JSONSchema:
    """Scores 1.0 for a completion that is JSON of a schema, by itself or in a fenced block; any JSON scores `parsed`.

    --reward json_schema:schema=person.json
    """

    schema: Path
    """File with a JSON schema."""
    parsed: float = 0.0
    """Score of JSON that does not fit the schema."""
    source: str = field(init=False, repr=False)
    """The schema."""

    def __post_init__(self) -> None:
        import jsonschema  # type: ignore[import-untyped]

        try:
            object.__setattr__(self, "source", self.schema.read_text())
            schema = json.loads(self.source)
            jsonschema.validators.validator_for(schema).check_schema(schema)
        except (OSError, ValueError, jsonschema.SchemaError) as error:
            said = getattr(error, "strerror", None) or getattr(error, "message", None) or error
            raise ConfigError(
                f"--reward json_schema: {self.schema} holds no JSON schema: {said}", hint="give schema=FILE.json"
            ) from None

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the scores depend on."""
        return (self.schema,)

    def __call__(self, task: Task, text: str) -> Score:
        """Return 1.0, `parsed` or 0.0, and the JSON as the answer."""
        try:
            if len(text) > _MOST_JSON:
                raise ValueError("too long")
            fenced = _FENCED.findall(text)
            value = json.loads(fenced[-1] if fenced else text)
            fits = _validator(self.source).is_valid(value)
            answer = json.dumps(value, sort_keys=True)
        except (ValueError, RecursionError):
            return Score(total=0.0, parts={"parsed": 0.0})
        return Score(total=1.0 if fits else self.parsed, parts={"parsed": 1.0}, answer=answer)


@functools.lru_cache(maxsize=16)
def _validator(source: str) -> Any:
    import jsonschema
    import referencing

    schema = json.loads(source)
    # With a registry of its own a $ref is never fetched from the network.
    return jsonschema.validators.validator_for(schema)(schema, registry=referencing.Registry())
