"""When there are as many distinct samples as were asked for: counted in reading order, whoever finishes first."""

from dataclasses import dataclass

from autotune.corpus.distinct import Piece
from autotune.corpus.pieces import read_index
from autotune.corpus.workplace import Receipt, Workplace

MAX_SAMPLES = 5_000_000
"""Their digests are held in memory, about 100 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """A finished partition and its pieces."""

    task: str
    receipt: Receipt

    def pieces(self) -> list[Piece]:
        """Its pieces, in reading order."""
        sizes = zip(self.receipt["samples"], self.receipt["text_bytes"], strict=True)
        return [
            Piece(task=self.task, number=number, samples=samples, text_bytes=text_bytes)
            for number, (samples, text_bytes) in enumerate(sizes)
        ]


class FirstDistinct:
    """Follows finished partitions until there are ``most`` distinct samples."""

    def __init__(self, workplace: Workplace, most: int) -> None:
        self._workplace, self._most = workplace, most
        self._waiting: dict[int, Extraction] = {}
        self._seen: set[bytes] = set()
        self.pieces: list[Piece] = []
        """What is taken so far; the last piece up to the last sample wanted."""
        self.partitions = 0
        """How many partitions these come from."""

    @property
    def distinct(self) -> int:
        """Distinct samples so far."""
        return len(self._seen)

    @property
    def reached(self) -> bool:
        """Whether there are enough."""
        return len(self._seen) >= self._most

    def add(self, position: int, extraction: Extraction) -> None:
        """Note a finished partition, by its position in reading order."""
        self._waiting[position] = extraction
        while not self.reached and self.partitions in self._waiting:
            self._take(self._waiting.pop(self.partitions))
            self.partitions += 1

    def _take(self, extraction: Extraction) -> None:
        for piece in extraction.pieces():
            if self.reached:
                return
            taken = 0
            for name in read_index(piece.paths(self._workplace))["digest"]:
                self._seen.add(name.tobytes())
                taken += 1
                if self.reached:
                    break
            self.pieces.append(Piece(task=piece.task, number=piece.number, samples=taken, text_bytes=piece.text_bytes))
