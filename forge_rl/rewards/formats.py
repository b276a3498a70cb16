"""Rewards for a completion's format: tags in order, a regular expression, JSON that matches a schema."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from forge_rl.errors import ConfigError, check_flags
from forge_rl.rewards.protocol import TextReward
from forge_rl.rewards.workers import shared_workers
from forge_rl.system.strict_json import parse_json
from forge_rl.types import Score, Task

_FENCE = "```"
_MOST_JSON = 100_000
"""Maximum length of a text that is parsed as JSON, in characters."""


@dataclass(frozen=True, kw_only=True)
class Format(TextReward):
    """Scores 1.0 for `<think>...</think><answer>...</answer>`: each tag once, in this order, and no other text.

    Format()(task, "<think>2 and 3</think> <answer>5</answer>")  # Score(total=1.0, answer="5")
    """

    thoughts: bool = True
    """Score the model's thoughts too: the first tag is theirs."""
    think: str = "think"
    """Name of the first tag; "" for none."""
    answer: str = "answer"
    """Name of the second tag."""
    opened: bool = False
    """Set if the chat template writes the first opening tag, so that completions begin inside it."""

    def __post_init__(self) -> None:
        if not self.answer:
            raise ConfigError("--reward format: answer is empty", hint="set answer to the name of the answer's tag")

    def __call__(self, task: Task, text: str) -> Score:
        """Return 1.0 or 0.0, and the contents of the answer tag."""
        rest = f"<{self.think}>{text}" if self.opened and self.think else text
        names = [name for name in (self.think, self.answer) if name]
        # Counting first catches a tag that is repeated inside of another one, which the walk below would not see.
        is_well_formed = all(rest.count(f"<{name}>") == rest.count(f"</{name}>") == 1 for name in names)
        contents = ""
        for name in names if is_well_formed else ():
            before, _, rest = rest.partition(f"<{name}>")
            contents, closing_tag, rest = rest.partition(f"</{name}>")
            is_well_formed = is_well_formed and bool(closing_tag) and not before.strip()
        return Score(total=1.0, answer=contents.strip()) if is_well_formed and not rest.strip() else Score(total=0.0)


@dataclass(frozen=True, kw_only=True)
class Regex(TextReward):
    """Scores 1.0 if a regular expression matches in the completion; its group `answer`, or else its first group, is the
    answer.

    --reward 'regex:pattern="^The answer is (\\d+)[.]$"'

    A search that times out, as some patterns do on some texts, scores 0.0.
    """

    pattern: str
    """Regular expression in the syntax of Python's `re`; quoted if it contains a comma or ends in a star and a number.
    Add (?s) to let . match newlines, (?i) to ignore case."""
    full: bool = False
    """Require the whole completion to match."""
    timeout_s: float = 1.0
    """Timeout per completion."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward regex:", above={"timeout_s": 0})
        import regex  # type: ignore[import-untyped]

        try:
            _compiled(self.pattern)
        except regex.error as error:
            raise ConfigError(
                f"--reward regex: {self.pattern!r} is not a regular expression: {error}", hint="fix the pattern"
            ) from None

    def __call__(self, task: Task, text: str) -> Score:
        """Return 1.0 or 0.0."""
        search = getattr(_compiled(self.pattern), "fullmatch" if self.full else "search")
        try:
            match = search(text, timeout=self.timeout_s)
        except TimeoutError:
            match = None
        if match is None:
            return Score(total=0.0)
        answer = match.groupdict().get("answer")
        return Score(total=1.0, answer=answer or (match.group(1) if match.re.groups else None) or "")


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> Any:
    import regex  # unlike `re`, it has timeouts

    return regex.compile(pattern)


@dataclass(frozen=True, kw_only=True)
class JSONSchema(TextReward):
    """Scores 1.0 for a completion that is JSON valid under a schema, bare or in a fenced block, and `parsed` for other
    JSON.

    --reward json_schema:schema=person.json

    As patterns and conditions of a schema can be slow, a confined process validates the JSON; a timeout counts as
    invalid.
    """

    schema: Path
    """File with a JSON schema."""
    parsed: float = 0.0
    """Score of JSON that is invalid under the schema."""
    timeout_s: float = 5.0
    """Timeout for validating one completion."""
    source: str = field(init=False, repr=False)
    """Text of the schema."""
    deadline_s: ClassVar[float] = 3600.0
    """Deadline of one score, including time in the queue."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward json_schema:", above={"timeout_s": 0})
        import jsonschema  # type: ignore[import-untyped]

        try:
            object.__setattr__(self, "source", self.schema.read_text())
            schema = json.loads(self.source)
            jsonschema.validators.validator_for(schema).check_schema(schema)
        except (OSError, ValueError, RecursionError, jsonschema.SchemaError) as error:
            reason = getattr(error, "strerror", None) or getattr(error, "message", None) or error
            raise ConfigError(
                f"--reward json_schema: {self.schema} has no valid JSON schema: {reason}", hint="set schema=FILE.json"
            ) from None

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the scores depend on."""
        return (self.schema,)

    async def __call__(self, task: Task, text: str) -> Score:
        """Return 1.0, `parsed` or 0.0, and the JSON as the answer.

        Raises:
            ForgeError: the schema refers to another schema, which is not fetched.
        """
        try:
            if len(text) > _MOST_JSON:
                raise ValueError("too long")
            # Keys are sorted so that answers which differ only in their order count as one, for example in a majority.
            answer = json.dumps(parse_json(last_fenced(text) or text), sort_keys=True)
        except (ValueError, RecursionError):
            return Score(total=0.0, parts={"parsed": 0.0})
        workers = shared_workers(__name__, "fits", 1, self.timeout_s, ("jsonschema", "referencing"))
        total = 1.0 if await workers(self.source, answer) is True else self.parsed
        return Score(total=total, parts={"parsed": 1.0}, answer=answer)


def last_fenced(text: str) -> str | None:
    """Return the contents of the last block between a line ending in ``` or ```json and one beginning with ```."""
    contents: str | None = None
    block_lines: list[str] | None = None
    for line in text.split("\n"):
        if block_lines is not None:
            if not (bare := line.lstrip()).startswith(_FENCE):
                block_lines.append(line)
                continue
            # The rest of the closing line may open the next block.
            contents, block_lines, line = "\n".join(block_lines), None, bare[len(_FENCE) :]
        if line.rstrip().endswith((_FENCE, f"{_FENCE}json")):
            block_lines = []
    return contents


def fits(source: str, answer: str) -> bool:
    """Return True if JSON is valid under a schema. Runs in a confined process, which is killed on a timeout."""
    try:
        return bool(_validator(source).is_valid(json.loads(answer)))
    except RecursionError:
        return False


@functools.lru_cache(maxsize=16)
def _validator(source: str) -> Any:
    import jsonschema
    import referencing

    schema = json.loads(source)
    # An empty registry keeps $ref from being fetched from the network.
    return jsonschema.validators.validator_for(schema)(schema, registry=referencing.Registry())
