"""Kinds of raw data: one module each, behind one protocol."""

from pathlib import Path

from autotune.corpus.sources.base import Source
from autotune.corpus.sources.elf import ElfSource
from autotune.corpus.sources.jsonl import JsonlSource
from autotune.corpus.sources.parquet import ParquetSource
from autotune.corpus.sources.text import TextSource
from autotune.errors import BadInput
from trainer.schema import nearest

SOURCES: dict[str, Source] = {
    source.kind: source for source in (ElfSource(), TextSource(), JsonlSource(), ParquetSource())
}


def open_source(spec: str) -> tuple[Source, str]:
    """The kind and the place that a specification such as ``elf:/usr/bin`` names.

    Raises:
        BadInput: If the kind is missing or unknown, or no place is named.
    """
    kind, colon, place = spec.partition(":")
    known = ", ".join(f"{name}:" for name in SOURCES)
    if not colon:
        suffix = Path(spec).suffix.removeprefix(".")
        likely = suffix if suffix in SOURCES else "text"
        raise BadInput(
            f"{spec!r} names no kind of source", next_step=f"Write one of {known} before it, as in {likely}:{spec}"
        )
    if kind not in SOURCES:
        match = nearest(kind, list(SOURCES))
        hint = f"Did you mean {match}:{place}?" if match else f"Known kinds: {known}"
        raise BadInput(f"unknown kind of source {kind!r}", next_step=hint)
    if not place:
        raise BadInput(f"{spec!r} names no place", next_step=f"Write for example: {kind}:/data")
    return SOURCES[kind], place
