"""Search over a text corpus with a local SQLite FTS5 index, built once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.system.encodable import encodable
from forge_rl.system.folders import make_private

_TEXTS = (".txt", ".md", ".rst", ".html", ".json", ".csv")
_MOST_CHARS = 600


@dataclass(frozen=True)
class Corpus:
    """A searchable text corpus.

    corpus = Corpus.open(Path("notes.jsonl"), cache)
    world = ToolEnv([corpus.tool(results=3)])
    """

    index: Path
    """SQLite database with an FTS5 table `texts` (title, text)."""

    @classmethod
    def open(cls, path: Path, cache: Path) -> Corpus:
        """Open a corpus: JSONL with "text" and optionally "title", a folder of text files, or an existing database.

        Unless the cache has an index of these files in their current state, builds one that other users cannot read.

        Raises:
            ConfigError: the corpus does not exist or cannot be read; names the file and line.
        """
        path = path.expanduser()
        if not path.exists():
            raise ConfigError(f"there is no corpus {path}", hint="name a JSONL file, a folder of text files, or a .db")
        if path.suffix in (".db", ".sqlite"):
            return cls(_checked(path.resolve()))
        files = sorted(file for file in path.rglob("*") if file.suffix in _TEXTS) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"the corpus {path} has no text files", hint=f"add files that end in {', '.join(_TEXTS)}")
        digest = hashlib.sha256()
        for file in files:
            # Path, size and time stand for the content: reading a whole corpus at each start would take long.
            state = file.stat()
            digest.update(f"{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
        make_private(cache, ConfigError)
        index = cache.resolve() / f"corpus-{digest.hexdigest()[:16]}.db"
        if not index.exists():
            _build(index, path, files)
        return cls(index)

    def tool(self, *, results: int = 3) -> Callable[[str], str]:
        """Return the tool function `search(query)`, which returns up to `results` texts."""
        return functools.partial(search, self, results)

    def search(self, query: str, results: int = 3) -> list[tuple[str, str]]:
        """Return the title and best snippet of the top texts for a query by BM25; any of its words matches."""
        words = re.findall(r"\w+", query)
        if not words:
            return []
        # Quoted, as a bare OR or NEAR would be an operator of FTS5.
        match_query = " OR ".join(f'"{word}"' for word in words[:32])
        statement = "SELECT title, snippet(texts, 1, '', '', ' ... ', 64) FROM texts WHERE texts MATCH ? "
        # immutable: an index never changes once it is in place, so that SQLite needs no locks.
        with contextlib.closing(sqlite3.connect(f"{self.index.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            # bm25's weights: a word in the title counts twice.
            rows = database.execute(statement + "ORDER BY bm25(texts, 2.0, 1.0) LIMIT ?", (match_query, results))
            return [(str(title), str(text)) for title, text in rows]


def search(corpus: Corpus, results: int, query: str) -> str:
    """Search the corpus for texts.

    Args:
        query: words to look for.
    """
    matches = corpus.search(query, results)
    return "\n\n".join(f"[{title}] {text}"[:_MOST_CHARS] for title, text in matches) or "nothing was found"


def _build(index: Path, path: Path, files: list[Path]) -> None:
    """Write an index to a temporary file next to its final path, then rename it atomically."""
    handle, name = tempfile.mkstemp(dir=index.parent, suffix=".tmp")
    os.close(handle)
    try:
        with contextlib.closing(sqlite3.connect(name)) as database:
            database.execute("CREATE VIRTUAL TABLE texts USING fts5(title, text)")
            database.executemany("INSERT INTO texts VALUES (?, ?)", _texts(path, files))
            # Merges the index into one segment, which is worth it as nothing is added later.
            database.execute("INSERT INTO texts(texts) VALUES ('optimize')")
            database.commit()
        os.replace(name, index)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _texts(path: Path, files: list[Path]) -> Iterator[tuple[str, str]]:
    for file in files:
        if file.suffix == ".jsonl":
            yield from _rows(file)
        else:
            yield str(file.relative_to(path) if file != path else file.name), file.read_text(errors="replace")


def _rows(file: Path) -> Iterator[tuple[str, str]]:
    with file.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                text = row["text"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ConfigError(
                    f"{file}:{number} has no text: {type(error).__name__}: {error}",
                    hint='write each line as {"title": ..., "text": ...}',
                ) from None
            # SQLite stores no lone surrogates, which a line may have as JSON escapes.
            yield encodable(str(row.get("title", number))), encodable(str(text))


def _checked(path: Path) -> Path:
    try:
        Corpus(path).search("a")
    except sqlite3.Error as error:
        raise ConfigError(
            f"the corpus {path} cannot be searched: {error}", hint="it needs an FTS5 table `texts` with title and text"
        ) from None
    return path
