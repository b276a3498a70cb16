"""Reward from a judge: a language model at any OpenAI-compatible endpoint that grades episodes by a rubric."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from forge_rl.criteria import Criterion, read_criteria
from forge_rl.errors import (
    ConfigError,
    JudgeError,
    SpendingError,
    TaskError,
    UngradedError,
    check_flags,
    check_installed,
)
from forge_rl.rewards.judge_store import JudgeStore
from forge_rl.rewards.rubric import compile_rubric, read_rubric, render
from forge_rl.system.encodable import encodable
from forge_rl.system.redaction import without_credentials
from forge_rl.system.strict_json import parse_json
from forge_rl.system.tasks import TaskGroup
from forge_rl.system.variables import api_key
from forge_rl.types import Episode, Score, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_FIRST_WAIT_S = 1.0
"""Wait before the first retry, doubled for each further one."""
_LONGEST_WAIT_S = 60.0
"""Maximum wait before a retry, without jitter, even if the endpoint asks for more."""
_REFUSES_REQUEST = (400, 413, 422)
"""Statuses that blame the request, for example for its length, rather than the endpoint or the key."""
_MOST_TOKENS = 1 << 40
"""Limit above which an endpoint's report of used tokens is ignored."""
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
_MOST_READ = 4000
"""Characters at the end of a reply that are searched for its grade; patterns take quadratic time at worst."""
# The last lookahead keeps "Score: 10" from being read as 1, should a match give digits back.
_LABELLED = re.compile(r"(?i)\bscore\W{0,6}?(-?\d+(?:\.\d+)?)(?![\d.]*\d)")
_SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "score": {"type": "number"}},
    "required": ["reason", "score"],
    "additionalProperties": False,
}


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Scores an episode from 0 to 1 by the grade that another model gives it.

    --reward judge:model=gpt-4o-mini,rubric=rubric.md
    --reward judge:model=qwen3,base_url=http://localhost:8000/v1,api_key_env=,max_calls=5000*0.5
    --reward judge:model=gpt-4o-mini,criteria=rubric

    If the endpoint fails or its reply contains no grade, the request is retried; if all retries fail, the episode's
    outcome is a judge error. Replies are cached.
    """

    model: str
    """Name of the model at the endpoint."""
    rubric: str = ""
    """Grading instructions: text, or a file with it. Jinja fills in {{question}}, {{answer}}, {{truth.answer}} and
    other entries of the truth, and {{transcript}}; if it uses none of them, question and answer are appended. By
    default the judge grades how well the answer answers the question, given the true answer if there is one."""
    criteria: str = ""
    """Entry of the task's truth with the task's own criteria, see `criteria.read_criteria`; each is graded by a request
    of its own, in whose rubric {{criterion}} is filled in. The score is the sum of weight times grade over the sum of
    positive weights: 1 at best, and below 0 if pitfalls, with negative weights, prevail."""
    base_url: str = ""
    """URL of the endpoint, up to and including /v1; defaults to OpenAI."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; empty if the endpoint needs none."""
    low: float = 0.0
    """Grade that scores 0."""
    high: float = 10.0
    """Grade that scores 1."""
    structured: bool = False
    """Request JSON with a schema (`response_format`) instead of text that ends with the grade."""
    max_tokens: int = 512
    """Maximum tokens of a reply."""
    temperature: float = 0.0
    """Sampling temperature of the judge; if negative, none is sent, for models that reject it."""
    retries: int = 4
    """Number of retries, after 1, 2, 4... seconds, or after the endpoint's Retry-After if that is longer."""
    timeout_s: float = 60.0
    """Timeout of one request."""
    concurrent: int = 16
    """Maximum concurrent requests per replica of the reward service."""
    max_calls: int = 10_000
    """Maximum requests in a run, including resumes; beyond it the run stops with an error. 0 means no limit."""
    max_spent_tokens: int = 0
    """Maximum prompt and reply tokens in a run, including resumes; beyond it the run stops with an error. 0 means no
    limit."""
    cache: Path | None = None
    """Folder of cached replies, to share them between runs; defaults to the run folder."""
    template: str = field(init=False, repr=False)
    """Text of the rubric."""
    _live: _JudgeState | None = field(default=None, init=False, repr=False, compare=False)
    deadline_s: ClassVar[float] = 3600.0
    """Deadline of one score, including time in the queue."""

    def __post_init__(self) -> None:
        check_installed("--reward judge", "openai", "openai")
        check_flags(
            self,
            "--reward judge:",
            minimum={"retries": 0, "concurrent": 1, "max_tokens": 1, "max_calls": 0, "max_spent_tokens": 0},
            above={"timeout_s": 0},
        )
        if not self.low < self.high or not math.isfinite(self.high - self.low):
            raise ConfigError(f"--reward judge: low is {self.low}, high is {self.high}", hint="set low below high")
        # Fails at the start of a run if the key is missing, not at the first score.
        api_key("--reward judge", self.api_key_env)
        object.__setattr__(self, "template", read_rubric(self.rubric, criteria=bool(self.criteria)))
        compile_rubric(self.template, bool(self.criteria))

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the scores depend on."""
        return (Path(self.rubric),) if self.rubric and self.template != self.rubric else ()

    def load(self, folder: Path | None) -> None:
        """Open the cache of replies: in a run's folder, or in memory."""
        # A shared cache holds replies alone: limits apply to one run, whose folder counts the spending.
        spending = JudgeStore(folder)
        replies = spending if self.cache is None else JudgeStore(self.cache)
        object.__setattr__(self, "_live", _JudgeState(replies, spending, asyncio.Semaphore(self.concurrent)))

    def __getstate__(self) -> Mapping[str, object]:
        # Neither a database connection nor a semaphore can be pickled; each process opens its own.
        return self.__dict__ | {"_live": None}

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Return a score from 0 to 1, or by the task's criteria.

        Raises:
            ForgeError: the rubric uses something that the task lacks.
            TaskError: the task's criteria are missing or malformed.
            JudgeError: the judge returned no grade; an UngradedError if it works but has none for this episode.
            SpendingError: a limit is reached.
        """
        if self._live is None:
            self.load(None)
        if self.criteria:
            return await self._by_criteria(task, episode)
        grade, is_cached = await self._graded(render(self.template, task, episode))
        return Score(total=grade, parts={"cached": float(is_cached)})

    async def _by_criteria(self, task: Task, episode: Episode) -> Score:
        """Grade each criterion of a task. Parts are all grades, and their weighted means by sign of the weight."""
        criteria = _criteria_of(task, self.criteria)
        prompts = [render(self.template, task, episode, criterion.text) for criterion in criteria]
        try:
            async with TaskGroup() as group:
                grading_tasks = [group.create_task(self._graded(prompt)) for prompt in prompts]
        except ExceptionGroup as errors:
            # A reached limit ends the run, so it must not hide behind another criterion's error.
            raise next(
                (error for error in errors.exceptions if isinstance(error, SpendingError)), errors.exceptions[0]
            ) from None
        grades = [grading_task.result()[0] for grading_task in grading_tasks]
        parts = {f"criterion_{number}": grade for number, grade in enumerate(grades, 1)}
        sums = {}
        # Score = (sum of w g over w > 0 - sum of |w| g over w < 0) / (sum of w over w > 0), with grades g from 0 to 1.
        for name, sign in (("wanted", 1), ("pitfalls", -1)):
            weighted_grades = [
                (abs(criterion.weight), grade)
                for criterion, grade in zip(criteria, grades, strict=True)
                if criterion.weight * sign > 0
            ]
            sums[name] = math.fsum(weight * grade for weight, grade in weighted_grades)
            if weighted_grades:
                parts[name] = sums[name] / math.fsum(weight for weight, _ in weighted_grades)
        max_total = math.fsum(criterion.weight for criterion in criteria if criterion.weight > 0)
        cached_share = sum(grading_task.result()[1] for grading_task in grading_tasks) / len(grading_tasks)
        return Score(total=(sums["wanted"] - sums["pitfalls"]) / max_total, parts={**parts, "cached": cached_share})

    async def _graded(self, prompt: str) -> tuple[float, bool]:
        """Return the grade for a prompt, scaled to 0 to 1, and whether it was cached."""
        live = self._live
        assert live is not None
        # The key covers endpoint, model, prompt and options, so an edited rubric or another model never gets a stale
        # grade.
        request = self._request(encodable(prompt))
        key = _digest(self.base_url, request)
        # Episodes of a group are often identical: the first one asks, the others wait for its reply.
        async with live.locks.setdefault(key, asyncio.Lock()):
            reply = await live.replies.reply(key)
            is_cached = reply is not None
            if reply is None:
                async with live.room:
                    reply = await self._ask(live, request)
                await live.replies.keep(key, reply)
        grade = self._grade(reply)
        assert grade is not None, "only replies with a grade are kept"
        return (grade - self.low) / (self.high - self.low), is_cached

    def _request(self, prompt: str) -> dict[str, Any]:
        worst, best = ("not met", "fully met") if self.criteria else ("worst", "best")
        span = f"a number from {self.low:g} ({worst}) to {self.high:g} ({best})"
        if self.structured:
            instruction = f'Reply with JSON alone: {{"reason": a short text, "score": {span}}}.'
        else:
            instruction = f"End your reply with a line `Score: N`, where N is {span}."
        request: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"{prompt}\n\n{instruction}"}],
            # OpenAI's newer models reject the old name, most other servers do not know the new one.
            ("max_tokens" if self.base_url else "max_completion_tokens"): self.max_tokens,
        }
        if self.temperature >= 0:
            request["temperature"] = self.temperature
        if self.structured:
            json_schema = {"name": "grade", "strict": True, "schema": _SCHEMA}
            request["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        return request

    async def _ask(self, live: _JudgeState, request: dict[str, Any]) -> str:
        """Return a reply that contains a grade."""
        import openai

        if live.client is None:
            key = api_key("--reward judge", self.api_key_env) or "none"
            # Retries are made here, where each is counted against the limits.
            live.client = openai.AsyncOpenAI(base_url=self.base_url or None, api_key=key, max_retries=0)
        problem = ""
        kind: type[JudgeError] = JudgeError
        for tries in range(self.retries + 1):
            # Counted before the request is sent: a crash or a timeout may lose the reply, but not its cost.
            await self._reserve(live)
            kind = JudgeError
            wait_s = _FIRST_WAIT_S * 2.0**tries
            try:
                async with asyncio.timeout(self.timeout_s):
                    completion: Any = await live.client.chat.completions.create(**request)
                reply = _text_of(completion)
                # Replies without a grade cost tokens as well.
                await live.spending.add_tokens(self._identity, _tokens_of(completion, request))
                if self._grade(reply) is not None:
                    return reply
                problem = f"its reply has no grade from {self.low:g} to {self.high:g}: {reply[-200:]!r}"
                kind = UngradedError
            except (TimeoutError, openai.APITimeoutError):
                problem = f"no reply within {self.timeout_s:g} s"
            except openai.APIStatusError as error:
                problem = f"status {error.status_code}: {without_credentials(error.message)[:300]}"
                # Other 4xx statuses would be the same next time.
                if error.status_code not in (408, 409, 429) and error.status_code < 500:
                    kind = UngradedError if error.status_code in _REFUSES_REQUEST else JudgeError
                    raise self._failed(problem, kind) from None
                # OpenAI reports an empty account as 429, like a rate limit, but waiting does not help.
                if error.code == "insufficient_quota":
                    raise self._failed(problem) from None
                wait_s = max(wait_s, _asked_wait_s(error.response.headers))
            except (openai.OpenAIError, ValueError, RecursionError) as error:  # not JSON, or nested too deeply
                cause = f": {error.__cause__}" if error.__cause__ else ""
                problem = f"{type(error).__name__}: {str(error)[:200]}{cause}"
            if tries < self.retries:
                # Jitter keeps requests that were refused together from returning together; it only adds, as an endpoint
                # refuses what comes before its Retry-After again.
                await asyncio.sleep(min(wait_s, _LONGEST_WAIT_S) * random.uniform(1, 1.25))
        raise self._failed(f"{problem} (asked {self.retries + 1} times)", kind)

    def _failed(self, problem: str, kind: type[JudgeError] = JudgeError) -> JudgeError:
        endpoint = without_credentials(self.base_url) or "OpenAI"
        return kind(
            f"the judge {self.model} at {endpoint} returned no grade: {problem}",
            hint="check the endpoint, and model, base_url and api_key_env in --reward judge:...",
        )

    async def _reserve(self, live: _JudgeState) -> None:
        if await live.spending.reserve(self._identity, max_calls=self.max_calls, max_tokens=self.max_spent_tokens):
            return
        calls, tokens = await live.spending.spent(self._identity)
        raise SpendingError(
            f"the judge {self.model} has used {calls} calls and {tokens} tokens in this run, and its limits are "
            f"max_calls={self.max_calls} and max_spent_tokens={self.max_spent_tokens} (0: no limit)",
            hint="to resume from the last checkpoint, raise the limit in --reward judge:... and add --out FOLDER "
            "--force-continue",
        )

    @property
    def _identity(self) -> str:
        """Key under which the judge's spending is counted, independent of its limits."""
        return f"{self.model} {_digest(self.base_url, self.template)[:12]}"

    def _grade(self, reply: str) -> float | None:
        """Return the grade in a reply: `score` in its JSON, or the last `Score: N`, or the last number in the range;
        None if there is none."""
        if self.structured:
            try:
                score = parse_json(reply)["score"]  # type: ignore[index]
                candidates = [float(score)] if isinstance(score, int | float) and not isinstance(score, bool) else []
            except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
                return None
        else:
            text = re.sub(rf"(?<=\d)\s*/\s*{re.escape(f'{self.high:g}')}\b", "", reply[-_MOST_READ:])  # 8/10
            # Markdown's stars are dropped, as in "**Score:** 8". Without a label, the last number in the range is the
            # grade.
            labelled_numbers = _LABELLED.findall(text.replace("*", ""))
            candidates = [float(number) for number in (labelled_numbers[-1:] or _NUMBER.findall(text))]
        valid_grades = [grade for grade in candidates if self.low <= grade <= self.high]
        return valid_grades[-1] if valid_grades else None


@dataclass(eq=False)
class _JudgeState:
    """State of a judge in the process that grades."""

    replies: JudgeStore
    spending: JudgeStore
    room: asyncio.Semaphore
    # Weak values: a lock disappears with the last request that holds it or waits for it.
    locks: weakref.WeakValueDictionary[str, asyncio.Lock] = field(default_factory=weakref.WeakValueDictionary)
    """One lock per request in flight, so that concurrent identical requests are sent once."""
    client: AsyncOpenAI | None = None


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _criteria_of(task: Task, entry: str) -> tuple[Criterion, ...]:
    try:
        return read_criteria(task.truth[entry])
    except (KeyError, ValueError) as error:
        raise TaskError(
            f"--reward judge: the rubric of task {task.id!r} of {task.source!r}, its truth's {entry!r}, "
            f"{'is missing' if isinstance(error, KeyError) else error}",
            hint="name its column with --tasks FILE:rubric=COLUMN; a rubric is a list such as "
            '[{"criterion": "Names the capital.", "weight": 1}]',
        ) from None


def _text_of(completion: Any) -> str:
    try:
        text = completion.choices[0].message.content
    except (AttributeError, LookupError, TypeError):
        raise ValueError(f"its reply is not a chat completion: {completion!r:.100}") from None
    return encodable(text) if isinstance(text, str) else ""


def _tokens_of(completion: Any, request: Mapping[str, Any]) -> int:
    """Return the tokens that the endpoint reports, or an estimate if it reports none."""
    total = getattr(getattr(completion, "usage", None), "total_tokens", None)
    letters = len(request["messages"][0]["content"]) + len(_text_of(completion))
    return total if isinstance(total, int) and 0 < total < _MOST_TOKENS else letters // 4 + 1


def _asked_wait_s(headers: Mapping[str, str]) -> float:
    """Return the seconds in Retry-After, or until its date by the endpoint's own clock; 0 if there is neither."""
    header = headers.get("retry-after", "")
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        end, start = parsedate_to_datetime(header), parsedate_to_datetime(headers.get("date", ""))
        return max(0.0, (end - start).total_seconds())
    except (ValueError, TypeError, OverflowError):  # not dates, or only one with a time zone
        return 0.0
