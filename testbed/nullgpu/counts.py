"""Counts of the stubs: kernels by name, library calls, copies, and waits.

Waits are those of the host.
"""

import struct
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_ENTRY = struct.Struct("q504s")  # as counts.c writes it


class Counts(Counter[tuple[str, str]]):
    """Number of events by kind and name.

    Kinds are ``kernel``, ``call`` (of a library), ``copy``, ``wait`` (the host waits
    for the device), ``poll`` and ``fault``.
    """

    @classmethod
    def read(cls, files: Iterable[Path]) -> "Counts":
        """Add up what processes have counted so far."""
        counts = cls()
        for path in files:
            for number, name in _ENTRY.iter_unpack(path.read_bytes()):
                if not number:
                    break
                kind, _, event = name.rstrip(b"\0").decode().partition(":")
                counts[kind, event] += number
        return counts

    def since(self, before: "Counts") -> "Counts":
        """Return what was counted after ``before``."""
        return Counts(
            {
                key: number - before[key]
                for key, number in self.items()
                if number > before[key]
            }
        )

    def of(self, kind: str) -> dict[str, int]:
        """Return one kind by name, the most frequent first."""
        return {
            name: number
            for (of_kind, name), number in self.most_common()
            if of_kind == kind
        }

    def total(self, kind: str | None = None) -> int:
        """Return how many there are of one kind."""
        return sum(
            number for (of_kind, _), number in self.items() if kind in (None, of_kind)
        )

    def kernels(self, text: str) -> int:
        """Return how many launches have a text in their kernel's readable name."""
        counts = self.of("kernel")
        readable = subprocess.run(
            ["c++filt"],
            input="\n".join(counts),
            capture_output=True,
            text=True,
            check=True,
        )
        names = readable.stdout.splitlines()
        return sum(
            number
            for name, number in zip(names, counts.values(), strict=True)
            if text in name
        )
