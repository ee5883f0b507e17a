"""``python -m benchmarks.words``: count the words of the documentation.

It rejects phrases that readers stumble over. Counted: README.md and docs/*.md without
code blocks; docs/reference/ is generated from the code. Checked for banned phrases and
long sentences: the pages, and every docstring and message of autotune, trainer and
benchmarks.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.bars import Bar, Direction, exit_code, lines

ROOT = Path(__file__).parent.parent

CHECKED_SINCE = "8a8fcbd"
"""Commit after which subjects are checked."""
SUBJECT_CHARACTERS, SENTENCE_WORDS, SUMMARY_CHARACTERS = 72, 40, 50
CODE = ("autotune/", "trainer/", "benchmarks/")

IMPERSONAL = (
    r"go(?:es|ing)? on|went on|anew|afresh|nobody|somebody|whoever|someone else"
)
BANNED = re.compile(
    rf"\b(?:{IMPERSONAL}|by itself|by themselves|held against|holds? .{{1,30}}"
    r" against|in turns"
    r"|of (?:its|their|his|one's) own"
    r"|stands? beside|real tokens|slot tokens|(?<!Data)(?<!data )loader"
    r" workers|ledgers?|unexplored|kept apart"
    r"|outside the allocator|multiprocessors?|matrix"
    r" (?:units?|products?)|paper-style|made ahead"
    r"|while which|as many as (?:are|is) meant|what (?:is|are|was|were)"
    r" (?:meant|asked|wanted)|one's own"
    r"|local ranks, as many|so many|that is all|nouns? of|dealt|dealing|signed off"
    r"|(?:graphics|network) cards?|the cards?|a card|cards)\b"
    r"|(?:^|[.!?:] )Where (?!(?:do|does|did|is|are|can|to|it lies)\b)"
    r"|\bwhere (?:there (?:is|are)|no|nothing|none|nobody|one|it (?:is|was|has)|they"
    r" (?:are|have))\b",
    re.IGNORECASE,
)
_FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_ADDRESS = re.compile(r"\]\([^)]*\)|https?://\S+|<[^>\n]+>")
_INLINE = re.compile(r"`+[^`\n]*`+")
_BLOCK_START = re.compile(
    r"^\s*(?:#|[│├└]|[-*+] |\d+\. |\||>|$|[\w, ]{1,40}:(?: |$)|\S.*\S {2,}\S)"
)
"""Lines with which a paragraph, an item of a list, an argument's description or a line
of a drawing begins."""
_WORD = re.compile(r"[A-Za-z][A-Za-z'\u2019-]*")
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"”*_]*\s+(?=[A-Z`\"“(*\[])")
_ABBREVIATION = re.compile(
    r"\b(e\.g|i\.e|vs|cf|et al|approx|no|max|min)\.", re.IGNORECASE
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.words", description="Check the project's words."
    )
    parser.add_argument(
        "paths",
        nargs="*",
        help="check only these files or folders for phrases and long sentences",
    )
    options = parser.parse_args(arguments)
    paths = tracked()
    problems = list(
        findings(
            [
                path
                for path in paths
                if not options.paths or path.startswith(tuple(options.paths))
            ]
        )
    )
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    if options.paths:
        return int(bool(problems))
    shown = bars(paths, problems)
    sys.stdout.write(f"{lines(shown)}\n")
    return exit_code(shown)


def tracked() -> list[str]:
    """Return all files that git tracks and that exist, relative to the repository.

    Without git, as in an unpacked source distribution, return all files.
    """
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, check=False, text=True
    )
    if listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name]
        return [name for name in names if (ROOT / name).is_file()]
    hidden = (".", "__", "build")
    paths = (path.relative_to(ROOT) for path in sorted(ROOT.rglob("*")))
    return [
        str(path)
        for path in paths
        if (ROOT / path).is_file()
        and not any(part.startswith(hidden) for part in path.parts[:-1])
    ]


def bars(paths: Sequence[str], problems: Sequence[str]) -> list[Bar]:
    """Return the figures of all pages together, and the number of findings."""
    pages = [path for path in paths if is_page(path)]
    prose = "\n\n".join(prose_of((ROOT / path).read_text()) for path in pages)
    statements = "\n".join(
        sentence
        for sentence in sentences(prose)
        if not sentence.rstrip(" *)").endswith("?")
    )
    words = len(_WORD.findall(prose))

    def per_thousand(pattern: str, text: str) -> float:
        return (
            1000
            * len(re.findall(rf"\b(?:{pattern})\b", text, re.IGNORECASE))
            / max(words, 1)
        )

    rows: tuple[tuple[str, float, Direction, float], ...] = (
        ("what_per_1000_words", per_thousand("what", statements), "<=", 3),
        ("where_per_1000_words", per_thousand("where", statements), "<=", 1),
        ("impersonal_per_1000_words", per_thousand(IMPERSONAL, prose), "<=", 0.1),
        ("you_per_1000_words", per_thousand("you|your|yours|yourself", prose), ">=", 6),
        ("phrases_and_long_sentences_count", len(problems), "<=", 0),
        ("long_commit_subjects_count", len(long_subjects()), "<=", 0),
    )
    return [
        Bar(
            name=name,
            figure=figure,
            unit=name.rpartition("_")[2],
            bar=bar,
            direction=direction,
        )
        for name, figure, direction, bar in rows
    ]


def is_page(path: str) -> bool:
    """Tell whether people write this page, unlike the generated reference."""
    return path == "README.md" or (
        path.startswith("docs/") and path.endswith(".md") and path.count("/") == 1
    )


def findings(paths: Sequence[str]) -> Iterator[str]:
    """Yield every banned phrase and every long sentence, as ``path:line: text``."""
    for path in paths:
        if is_page(path):
            for line, text in blocks((ROOT / path).read_text()):
                yield from _findings_in(path, line, text)
        elif (
            path.startswith(CODE)
            and path.endswith(".py")
            and path != "benchmarks/words.py"
        ):
            for line, text in texts_of(ast.parse((ROOT / path).read_text())):
                yield from _findings_in(path, line, text)


def _findings_in(path: str, line: int, text: str) -> Iterator[str]:
    for phrase in BANNED.finditer(" ".join(text.split())):
        yield f"{path}:{line}: say it in the field's words: {phrase.group().strip()!r}"
    for sentence in sentences(text):
        if (number := len(_WORD.findall(sentence))) > SENTENCE_WORDS and re.search(
            "[.,;:]", sentence
        ):
            yield (
                f"{path}:{line}: {number} words in a sentence:"
                f" {' '.join(sentence.split())[:60]} …"
            )


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield docstrings and messages with their lines.

    They are string constants of two words or more, in pieces of prose.
    """
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
    }
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant)
    ]
    for node in sorted(nodes, key=lambda constant: constant.lineno):
        text = None
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                (
                    part.value
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                    else "N"
                )
                for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            text = node.value
        if text is not None and len(text.split()) > 1:
            for offset, block in blocks(text):
                yield node.lineno + offset - 1, block


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, items of lists and cells of tables with their lines.

    Code and addresses are left out.
    """
    for pattern in (_FENCED, _COMMENT):
        text = pattern.sub(lambda match: "\n" * match.group().count("\n"), text)
    text = _INLINE.sub("N", _ADDRESS.sub("]", text))
    rows = text.splitlines()
    starts = [number for number, row in enumerate(rows) if _BLOCK_START.match(row)]
    for start, end in pairwise([0, *starts, len(rows)]):
        block = "\n".join(rows[start:end])
        for cell in (
            re.split(r" \| |^\| | \|$", block) if block.startswith("|") else [block]
        ):
            if cell.strip():
                yield start + 1 + (not rows[start].strip()), cell


def prose_of(text: str) -> str:
    """Return a page's prose."""
    return "\n\n".join(block for _, block in blocks(text))


def sentences(text: str) -> list[str]:
    """Split a text into sentences; paragraphs end one as well."""
    unabbreviated = _ABBREVIATION.sub(r"\1", text)
    return [
        sentence
        for block in unabbreviated.split("\n\n")
        for sentence in _SENTENCE_END.split(block)
        if sentence.strip()
    ]


def long_subjects() -> list[str]:
    """Return the subjects of newer commits that are too long.

    Without a history, there are none.
    """
    listed = subprocess.run(
        ["git", "log", "--no-merges", "--format=%s", f"{CHECKED_SINCE}..HEAD"],
        cwd=Path(ROOT),
        capture_output=True,
        text=True,
        check=False,
    )
    return [
        subject
        for subject in listed.stdout.splitlines()
        if len(subject) > SUBJECT_CHARACTERS
    ]


if __name__ == "__main__":
    sys.exit(main())
