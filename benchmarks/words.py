"""``python -m benchmarks.words``: reject phrases that readers stumble over.

Checked are README.md, docs/*.md without code blocks (docs/reference/ is generated), and
every docstring and message of autotune, trainer and benchmarks. Sentences must not be
too long either, nor the subjects of commits.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = ("autotune", "trainer", "benchmarks")
SENTENCE_WORDS, SUBJECT_CHARACTERS = 40, 72
CHECKED_SINCE = "8a8fcbd"
"""Commit after which subjects are checked."""

INSTEAD: Mapping[str, str] = {
    "go(?:es|ing)? on|went on": "resume, continue",
    "anew|afresh": "again, from scratch",
    "nobody|somebody|whoever|someone else": "you",
    "by itself|by themselves": "automatically",
    "held against|holds? .{1,30} against": "compare, validate",
    "stands? beside": "match",
    "in turns": "interleaved",
    "(?:of )?one's own|of (?:its|their|his) own": "its own",
    "real tokens|slot tokens": "non-padding tokens",
    "(?<!Data)(?<!data )loader workers": "DataLoader workers",
    "ledgers?": "trial log, memory breakdown",
    "unexplored": "starting configuration",
    "kept apart": "held out",
    "made ahead": "pre-tokenised",
    "outside the allocator": "non-PyTorch memory",
    "multiprocessors?": "SM",
    "matrix (?:units?|products?)": "Tensor Core, matmul",
    "paper-style": "paper baseline",
    "dealt|dealing": "split",
    "signed off": "approved",
    "(?:graphics|network) cards?|(?:the|a) card|cards": "GPU, NIC",
    "as many as (?:are|is) meant|local ranks, as many": "GPUs per node",
    "what (?:is|are|was|were) (?:meant|asked|wanted)": "the name of the thing",
    "so many|while which|that is all|nouns? of": "a verb and a number",
    "where (?:there (?:is|are)|it (?:is|was|has)|they (?:are|have))": "if",
    "where (?:no|nothing|none|one)": "if",
    # Begins a sentence; not in a question, nor of a place.
    "(?:^|(?<=[.!?:] ))Where(?= )(?! (?:do|does|did|is|are|can|to|it lies)\\b)": "if",
}
"""Phrases, and what to write instead; the glossary has the terms."""
_PHRASES = {
    re.compile(rf"(?<!\w)(?:{phrase})(?!\w)", re.IGNORECASE): instead
    for phrase, instead in INSTEAD.items()
}
_NO_PROSE = re.compile(
    r"^( *)(```|~~~).*?^\1\2 *$|<!--.*?-->", re.DOTALL | re.MULTILINE
)
_ADDRESS = re.compile(r"\]\([^)]*\)|https?://\S+|<[^>\n]+>")
_INLINE_CODE = re.compile(r"`+[^`\n]*`+")
_BLOCK_START = re.compile(
    r"^\s*(?:#|[│├└]|[-*+] |\d+\. |\||>|$|[\w, ]{1,40}:(?: |$)|\S.*\S {2,}\S)"
)
"""Lines with which a paragraph, an item of a list, an argument's description or a line
of a drawing begins."""
_CELL_BORDER = re.compile(r" \| |^\| | \|$")
_WORD = re.compile(r"[A-Za-z][A-Za-z'\u2019-]*")
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"”*_]*\s+(?=[A-Z`\"“(*\[])")
_ABBREVIATION = re.compile(
    r"\b(e\.g|i\.e|vs|cf|et al|approx|no|max|min)\.", re.IGNORECASE
)


def main() -> int:
    """Print every finding and return the exit code."""
    findings = [*findings_in_pages(), *findings_in_code(), *long_subjects()]
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return int(bool(findings))


def findings_in_pages() -> Iterator[str]:
    """Yield the findings in pages that people write."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for line, text in blocks(page.read_text()):
            yield from findings_in(f"{page.relative_to(ROOT)}:{line}", text)


def findings_in_code() -> Iterator[str]:
    """Yield the findings in docstrings and messages."""
    files = [
        file for package in CODE for file in sorted((ROOT / package).rglob("*.py"))
    ]
    for file in files:
        if file != Path(__file__):
            for line, text in texts_of(ast.parse(file.read_text())):
                yield from findings_in(f"{file.relative_to(ROOT)}:{line}", text)


def findings_in(position: str, text: str) -> Iterator[str]:
    """Yield every phrase to avoid, and every long sentence, after their position."""
    unwrapped = " ".join(text.split())
    for phrase, instead in _PHRASES.items():
        for found in phrase.finditer(unwrapped):
            yield f"{position}: {found.group()!r}: write {instead!r}"
    for sentence in sentences(text):
        words = len(_WORD.findall(sentence))
        # Without punctuation, it is a list of names.
        if words > SENTENCE_WORDS and re.search("[.,;:]", sentence):
            shown = " ".join(sentence.split())[:60]
            yield f"{position}: {words} words in a sentence: {shown} …"


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the prose of docstrings and messages with its lines.

    Strings without a space are keys; an f-string is read in its parts.
    """
    strings = (
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    for line, string in strings:
        if " " in string:
            for offset, block in blocks(string):
                yield line + offset - 1, block


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, items of lists and cells of tables with their lines.

    Code and addresses are left out.
    """
    text = _NO_PROSE.sub(lambda match: "\n" * match.group().count("\n"), text)
    text = _INLINE_CODE.sub("N", _ADDRESS.sub("]", text))
    rows = text.splitlines()
    starts = [number for number, row in enumerate(rows) if _BLOCK_START.match(row)]
    for start, end in pairwise([0, *starts, len(rows)]):
        block = "\n".join(rows[start:end])
        # A block that begins with an empty line has its text in the next one.
        line = start + 1 if block.strip() and rows[start].strip() else start + 2
        cells = _CELL_BORDER.split(block) if block.startswith("|") else [block]
        yield from ((line, cell) for cell in cells if cell.strip())


def sentences(text: str) -> list[str]:
    """Split a block into sentences."""
    return _SENTENCE_END.split(_ABBREVIATION.sub(r"\1", text))


def long_subjects() -> list[str]:
    """Return a finding for each newer commit whose subject is too long.

    Without a history, there are none.
    """
    listed = subprocess.run(
        ["git", "log", "--no-merges", "--format=%s", f"{CHECKED_SINCE}..HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return [
        f"subject of a commit: {len(subject)} characters: {subject}"
        for subject in listed.stdout.splitlines()
        if len(subject) > SUBJECT_CHARACTERS
    ]


if __name__ == "__main__":
    sys.exit(main())
