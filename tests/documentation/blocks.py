"""Commands that the documentation shows, in fenced blocks and in prose.

A block of ``sh`` holds commands; any other block holds them where a line begins with
``$ ``, and what follows is what they print. A line that ends with a backslash goes on,
and so does one inside of open quotes. ``…`` stands for what was left out.
"""

import re
import shlex
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
ELLIPSIS = "…"
_PROMPT = "$ "
_ASSIGNMENT = re.compile(r"([a-z_]+)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to type, with the output that the page shows."""

    page: Path
    line: int
    """Of the page, where it begins."""
    text: str
    prints: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"

    @property
    def words(self) -> list[str]:
        """Words as a shell splits them, without brackets around optional ones."""
        text = (
            re.sub(r"\[([^\]]*)\]", r"\1", self.text)
            if " [" in self.text
            else self.text
        )
        return shlex.split(text, comments=True)


def commands_of(page: Path) -> list[Command]:
    """Return all commands of a page's blocks, in order, with variables filled in.

    A variable is one that the same block sets.
    """
    commands: list[Command] = []
    for language, first, lines in _blocks(page.read_text()):
        variables: dict[str, str] = {}
        for command in _commands(page, language, first, lines):
            text = command.text
            for name, value in variables.items():
                text = re.sub(rf"^\${name}\b", value, text)
            assignment = _ASSIGNMENT.fullmatch(text)
            if assignment is None:
                commands.append(replace(command, text=text))
            else:
                variables[assignment[1]] = " ".join(shlex.split(assignment[2]))
    return commands


def named_in_prose(page: Path, names: Container[str] = ()) -> Iterator[Command]:
    """Yield commands that prose names: ``autotune …``, or ``names`` with options.

    Blocks are left out.
    """
    inside = False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            for text in re.findall(r"`([a-z][^`]* [^`]+)`", line):
                if text.startswith("autotune ") or (
                    text.split()[0] in names and " --" in text
                ):
                    plain = text.removeprefix("autotune ").replace("\\|", "|")
                    yield Command(page=page, line=number, text=f"autotune {plain}")


def _blocks(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield language, number of the first line, and lines of each fenced block."""
    language: str | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = re.match(r"\s*```\s*(\S*)", line)
        if fence is None:
            lines.append(line)
        elif language is None:
            language = fence[1]
            lines = []
        else:
            yield language, number - len(lines), lines
            language = None


def _commands(
    page: Path, language: str, first: int, lines: list[str]
) -> Iterator[Command]:
    position = 0
    while position < len(lines):
        begins = position
        line = lines[position]
        position += 1
        typed = line.strip() if language == "sh" else line.removeprefix(_PROMPT)
        if (
            not typed
            or typed.startswith("#")
            or (language != "sh" and not line.startswith(_PROMPT))
        ):
            continue
        while position < len(lines) and _goes_on(typed):
            typed = (
                f"{typed.removesuffix(chr(92))}\n{lines[position].removeprefix('> ')}"
            )
            position += 1
        prints: list[str] = []
        while (
            language != "sh"
            and position < len(lines)
            and not lines[position].startswith(_PROMPT)
        ):
            prints.append(lines[position])
            position += 1
        text = " ".join(typed.split("\n")) if "\\" in line else typed
        yield Command(page=page, line=first + begins, text=text, prints=tuple(prints))


def _goes_on(typed: str) -> bool:
    if typed.endswith("\\"):
        return True
    try:
        shlex.split(typed, comments=True)
    except ValueError:  # open quotes
        return True
    return False
