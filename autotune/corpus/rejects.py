"""The list of what could not be used."""

import json
from pathlib import Path

from autotune.corpus.sources.base import Reject
from autotune.errors import BadInput


def strict(reject: Reject, count: int) -> BadInput:
    """What ends a preparation that forgives nothing."""
    where = f"{reject.path}, {reject.where}" if reject.where else reject.path
    return BadInput(
        f"{count} cannot be used, and --strict is set; the first, {where!r}: {reject.reason}",
        next_step="Correct or remove it. Without --strict it is left out and listed, and the same work goes on.",
    )


def read_rejects(path: Path, most: int) -> list[Reject]:
    """The first of a list."""
    if not path.is_file():
        return []
    with path.open() as file:
        return [Reject(**json.loads(line)) for line, _ in zip(file, range(most), strict=False)]
