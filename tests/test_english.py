"""Sentences are read once. Each names its subject: none begins with "What was written ..." or "Who
...". None has "those of" or "those that", or the vague "goes on" and "let go".
None has "all that", "what was" or "what lies" in the place of a noun, and no text begins with "Of".

The tests read docstrings, comments, documents and the messages of the packages. They leave out code
blocks. Questions may begin with these words.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACES = (
    "kvstore", "bulk", "backup", "spark_connector", "pyspark_kvstore",
    "benchmarks", "docs", "tests", "*.md",
)  # fmt: skip

_NOUNLESS = re.compile(
    r"(?:\A|\n\s*\n|^\s*(?:[-*]|\d+\.)|[.:;!?)`\"]\s)\s*"  # where a sentence begins
    r"((?:What (?:is|was|has|are|were|have|had|a|an|the|no|each|came|comes|it|they)"
    r"|Those (?:that|who)|Who|Whoever|Whatever|Whose)\b"
    r"(?:[^.?\n]|\n(?!\s*\n))*\??)",
    re.MULTILINE,
)
_VAGUE = re.compile(
    r"\bthose (?:of|that|which|who|for|in|with|without|under|inside|given|being)\b"
    r"|\bgo(?:es|ing)? on\b(?! (?:a|to|disk)\b)|\blet(?:s|ting)? (?:\w+ ){0,3}go\b(?! first)"
    r"|\ball (?:that|who)\b|\bwhat (?:was|were|lies|came|comes)\b"
    r"|\bthat of\b|\bthe (?:former|latter)\b|\bto whom\b|\bwhatever (?:is|was|comes|holds|else)\b"
    r"|(?-i:\A(?:Of|Also|Before,|As where)\s)",
    re.IGNORECASE,
)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_CODE = re.compile(r"`[^`]*`|\"[^\"]*\"")
"""Code, and words that are quoted."""


@pytest.mark.parametrize("place", PLACES)
def test_each_sentence_names_its_subject(place: str) -> None:
    paths = files(place)
    assert paths
    wrong = {
        str(path.relative_to(ROOT)): sentences
        for path in paths
        if (sentences := [one for text in texts(path) for one in nounless(text)])
    }
    assert wrong == {}


@pytest.mark.parametrize("place", PLACES)
def test_no_sentence_leans_on_a_vague_phrase(place: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): phrases
        for path in files(place)
        if (phrases := [one for text in texts(path) for one in vague(text)])
    }
    assert wrong == {}


def vague(text: str) -> list[str]:
    """The phrases of `text` that send a reader back, each with the words behind it."""
    words = " ".join(_CODE.sub("", text).split())
    return [words[each.start() : each.end() + 30] for each in _VAGUE.finditer(words)]


def nounless(text: str) -> list[str]:
    """The sentences of `text` that have no noun; the last word decides what is a question."""
    return [" ".join(each.split()) for each in _NOUNLESS.findall(text) if not each.endswith("?")]


def files(place: str) -> list[Path]:
    if "*" in place:
        return sorted(ROOT.glob(place))
    kinds = ("py", "pyx", "pxi", "md")
    found = [path for kind in kinds for path in sorted((ROOT / place).rglob(f"*.{kind}"))]
    return [path for path in found if not path.match("_[!_]*.md")]  # made by the build


@cache
def texts(file: Path) -> tuple[str, ...]:
    """A document, or the docstrings and the comments of a module, and the messages of a package."""
    return tuple(_texts(file))


def _texts(file: Path) -> Iterator[str]:
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        yield _FENCED.sub("", source)
        return
    yield from comments(source)
    if file.suffix != ".py":  # Cython, which the parser does not know
        yield from _DOCSTRING.findall(source)
        return
    is_ours = file.relative_to(ROOT).parts[0] not in ("tests", "benchmarks", "docs")
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                yield docstring
            case ast.Constant(value=str(message)) if is_ours and message.count(" ") >= 2:
                yield message


def comments(source: str) -> Iterator[str]:
    """The comments of a module; comments on neighbouring lines are one text."""
    found = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    numbered = enumerate(found)
    for _, block in groupby(numbered, lambda pair: pair[1].start[0] - pair[0]):
        yield "\n".join(token.string.lstrip("# ") for _, token in block)


def test_the_pattern_finds_sentences_without_a_noun_and_nothing_else() -> None:
    assert nounless("What was written\nis gone.") == ["What was written is gone"]
    assert len(nounless("Good. Who has it?\n\n* Those that end. Whose they are, is told.")) == 2
    assert (
        nounless("What is a hold? What that costs is told below. Nobody says what is what.") == []
    )
    assert list(comments("x = 1  # What a\n# read sees.\n\n# Two.\n")) == [
        "What a\nread sees.",
        "Two.",
    ]


def test_vague_phrases_are_found_and_quoted_words_are_not() -> None:
    assert vague("It keeps those\nof the store.") == ["those of the store."]
    assert len(vague("The scan goes on. It lets the lock go; those who wait go on.")) == 4
    assert len(vague("Of each. It reads all that is there, and what was written.")) == 3
    assert len(vague("Its time is that of the latter. Whatever comes, it stays.")) == 3
    assert vague('These go on disk. "Those of" and `let_go` are words. It goes to the end.') == []


def test_messages_and_the_texts_of_compiled_modules_are_read() -> None:
    found = texts(ROOT / "kvstore/verify/records.py")
    assert "the stamps in use differ from the records" in found
    assert any("The value of `key`" in text for text in texts(ROOT / "kvstore/loops/lookup.pyx"))
