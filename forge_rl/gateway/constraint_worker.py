"""Tries requests' constraints in processes that may crash or hang. A script that imports nothing from forge_rl.

python -I constraint_worker.py LIMITS

It reads JSON lines: first the tokenizer's vocabulary, serialized by xgrammar, then one [kind, text] per constraint. It
answers each with a line, [problem], where "" means that an engine can decode under the constraint. Each is tried in a
fork, under limits on CPU time and memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import resource
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xgrammar

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\{\d+(?:, ?-?\d*)?\}|[\w.\-]+|[()|*+?]')
"""Tokens of a grammar in xgrammar's printed normal form."""
_MOST_TEXT = 2 << 20
"""Maximum characters of a grammar's normal form."""
_MOST_EMPTY = 8
"""Maximum repeats of an item that may be empty: each token follows all ways to distribute the empty ones."""
_MOST_REPEATS = 1 << 31
"""Maximum product of nested repeats."""
_WALKS, _WALK_TOKENS = 3, 256
"""Completions sampled under a constraint, and maximum tokens of each."""
_MEAN_S, _WORST_S = 0.025, 0.5
"""Limits on the mean and the worst CPU time of a token of such a completion: all requests wait for it."""


def main(limits: dict[str, float]) -> None:
    """Try constraints from stdin until it is closed."""
    die_with(os.getppid())
    vocabulary = xgrammar.TokenizerInfo.deserialize_json(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        # A fork per constraint: a crash or an exceeded limit ends only that trial, and the vocabulary is in memory
        # already.
        read, write = os.pipe()
        parent = os.getpid()
        if not (child := os.fork()):
            die_with(parent)
            os.close(read)
            kind, text = json.loads(line)
            # At most 1000 bytes, which a pipe takes without a reader.
            os.write(write, attempt(vocabulary, kind, text, limits).encode()[:1000])
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            problem = pipe.read().decode(errors="replace")
        _, status = os.waitpid(child, 0)
        print(json.dumps([ending(status) or problem]), flush=True)


def die_with(parent: int) -> None:
    """Kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # A parent that ended before prctl sends no signal.
    if os.getppid() != parent:
        os._exit(1)


def ending(status: int) -> str:
    """Describe why an attempt did not finish; "" if it did."""
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return ""
    if code in (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGALRM):
        return "it takes too long"
    return "it takes too much memory, or crashes the compiler"


def attempt(vocabulary: Any, kind: str, text: str, limits: dict[str, float]) -> str:
    """Compile a constraint and sample under it, in this process; return the problem, or ""."""
    # Engines and requests on the same cores go first.
    os.nice(5)
    signal.alarm(round(limits["wall_s"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as statm:
        mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    # RLIMIT_AS limits all mappings, so that those inherited from the parent are added.
    memory_limit = mapped_bytes + int(limits["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    allow_cpu(limits["read_s"])
    try:
        make, compile_name, arguments = FORMS[kind]
        args = arguments(text)
        grammar = getattr(xgrammar.Grammar, make)(*args)
        allow_cpu(limits["compile_s"])
        if problem := repeats_too_much(str(grammar)):
            return problem
        compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
        compiled = getattr(compiler, compile_name)(*args)
        allow_cpu(limits["walk_s"])
        return walk(compiled, vocabulary.vocab_size)
    except MemoryError:
        return "it takes too much memory"
    except Exception as error:
        return f"it cannot be compiled: {str(error).splitlines()[0][:300]}" if str(error) else "it cannot be compiled"


def allow_cpu(seconds: float) -> None:
    """Limit this process to `seconds` more seconds of CPU time."""
    # RLIMIT_CPU counts from the start of the process. The hard limit stays, so that the next phase can raise the soft
    # one.
    limit = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def tags(text: str) -> tuple[Any, ...]:
    """Parse a structural tag like vLLM, which accepts two formats."""
    tag = json.loads(text)
    if "structures" not in tag:
        return (text,)
    items = (
        xgrammar.StructuralTagItem(
            begin=structure["begin"], schema=json.dumps(structure["schema"]), end=structure["end"]
        )
        for structure in tag["structures"]
    )
    return list(items), tag["triggers"]


def as_it_is(text: str) -> tuple[Any, ...]:
    return (text,)


FORMS: dict[str, tuple[str, str, Any]] = {
    "regex": ("from_regex", "compile_regex", as_it_is),
    "json": ("from_json_schema", "compile_json_schema", as_it_is),
    "ebnf": ("from_ebnf", "compile_grammar", as_it_is),
    "lark": ("from_lark", "compile_lark", as_it_is),
    "tag": ("from_structural_tag", "compile_structural_tag", tags),
}
"""For each kind of constraint, how xgrammar reads and compiles it, and its arguments."""


def walk(compiled: Any, vocabulary_size: int) -> str:
    """Sample completions under a grammar; return the problem, or ""."""
    # [1, ceil(V / 32)] words with a bit for each of V tokens.
    mask = np.full((1, (vocabulary_size + 31) // 32), -1, np.int32)
    draw = random.Random(0)
    for _ in range(_WALKS):
        matcher = xgrammar.GrammarMatcher(compiled)
        stops = set(matcher.stop_token_ids)
        total_s = 0.0
        for count in range(1, _WALK_TOKENS + 1):
            start_time = time.thread_time()
            matcher.fill_next_token_bitmask(mask, 0)
            fill_s = time.thread_time() - start_time
            allowed_ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocabulary_size])
            if not len(allowed_ids):
                return "it allows no first token" if count == 1 else ""
            # A stop token would end the walk early. After eight draws, hardly anything else is allowed.
            token = next(
                (int(token_id) for token_id in draw.choices(allowed_ids, k=8) if int(token_id) not in stops), None
            )
            if token is None:
                break
            start_time = time.thread_time()
            matcher.accept_token(token)
            token_s = fill_s + time.thread_time() - start_time
            total_s += token_s
            # The mean is over at least 16 tokens, so that a slow start alone does not exceed it.
            if token_s > _WORST_S or total_s / max(count, 16) > _MEAN_S:
                return f"each token takes {1000 * total_s / count:.0f} ms, for which all requests wait"
            if matcher.is_terminated():
                break
    return ""


@dataclass
class Rule:
    """A rule of a grammar, or a group within one."""

    alternatives: list[list[Item]] = field(default_factory=lambda: [[]])
    may_be_empty: bool = False


@dataclass
class Item:
    """An item of a rule: the name of a rule, or a literal, possibly empty."""

    rule: str
    is_empty: bool = False
    min_count: int = 1
    max_count: int = 1


def read_rules(text: str) -> dict[str, Rule]:
    """Parse a grammar in normal form."""
    rules: dict[str, Rule] = {}
    for line in text.splitlines():
        name, _, body = line.partition(" ::= ")
        open_rules = [rules.setdefault(name, Rule())]
        for token in _TOKEN.findall(body):
            items = open_rules[-1].alternatives[-1]
            if token == "(":
                # A name that no rule of a grammar can have.
                group = f"({len(rules)}"
                items.append(Item(group))
                open_rules.append(rules.setdefault(group, Rule()))
            elif token == ")":
                open_rules = open_rules[:-1] or open_rules
            elif token == "|":
                open_rules[-1].alternatives.append([])
            elif token in "*+?" or token[0] == "{":
                if items:
                    min_count, _, max_count = (
                        token[1:-1].partition(",") if token[0] == "{" else ("0" * (token != "+"), "", "-1")
                    )
                    items[-1].min_count = int(min_count or 1)
                    # An open range is recursion, not a count.
                    items[-1].max_count = max(int(max_count or min_count or 1), 1)
            else:
                literal = token[0] in '"['
                items.append(Item("" if literal else token, is_empty=token == '""'))
    return rules


def repeats_too_much(text: str) -> str:
    """Check the repeats in a grammar in normal form; return the problem, or ""."""
    if len(text) > _MOST_TEXT:
        return f"its grammar has {len(text)} characters, more than {_MOST_TEXT}"
    rules = read_rules(text)

    def may_be_empty(item: Item) -> bool:
        return item.min_count == 0 or item.is_empty or (item.rule in rules and rules[item.rule].may_be_empty)

    # A fixed point: whether a rule may be empty depends on rules that come later, or on itself.
    has_changed = True
    while has_changed:
        has_changed = False
        for rule in rules.values():
            if not rule.may_be_empty and any(all(map(may_be_empty, items)) for items in rule.alternatives):
                rule.may_be_empty = has_changed = True

    products: dict[str, tuple[int, int]] = {}

    def nested(name: str) -> tuple[int, int]:
        """Return the largest product of nested repeats below a rule, of all items and of those that may be empty."""
        if name not in rules or name in products:
            return products.get(name, (1, 1))
        products[name] = (1, 1)  # for recursive rules
        max_product = max_empty_product = 1
        for item in (item for items in rules[name].alternatives for item in items):
            inner_product, inner_empty_product = nested(item.rule)
            is_empty = item.rule in rules and rules[item.rule].may_be_empty
            max_product = max(max_product, item.max_count * inner_product)
            max_empty_product = max(max_empty_product, (item.max_count if is_empty else 1) * inner_empty_product)
        products[name] = max_product, max_empty_product
        return max_product, max_empty_product

    # Rules may refer to one another in a chain as long as the grammar.
    sys.setrecursionlimit(20_000)
    product_pairs = [nested(name) for name in rules]
    max_product, max_empty_product = (max((pair[index] for pair in product_pairs), default=1) for index in (0, 1))
    if max_empty_product > _MOST_EMPTY:
        return f"it repeats an item that may be empty up to {max_empty_product} times, more than {_MOST_EMPTY}"
    if max_product > _MOST_REPEATS:
        return f"its nested repeats multiply to {max_product}, more than {_MOST_REPEATS}"
    return ""


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
