"""Lines of tables of memory by term."""

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.base.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TermLine:
    """A line of a table of memory: a term, or a total below the terms."""

    name: str
    size_bytes: int

    @property
    def size(self) -> str:
        """Size with its unit."""
        return format_bytes(self.size_bytes)


def term_lines(terms_bytes: Mapping[str, int]) -> list[TermLine]:
    """Return a line for each term of a memory breakdown, the largest first."""
    largest_first = sorted(terms_bytes.items(), key=lambda item: -item[1])
    return [TermLine(name=name, size_bytes=size) for name, size in largest_first]
