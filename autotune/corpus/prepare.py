"""Programs to a tokenised dataset: find, extract, drop duplicates, learn a tokenizer, encode, publish.

The same files give the same bytes, whatever the number of processes and whoever finishes first: files are taken in a
fixed order, and of several equal functions the first is kept.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.core.dataset import DEFAULT_VOCAB_SIZE
from autotune.core.units import format_count
from autotune.corpus.distinct import DistinctText, Update, gather_distinct
from autotune.corpus.place import build_beside
from autotune.corpus.sources import Rejected, find_elf_files
from autotune.corpus.tokenizer import DatasetTokenizer, learn_tokenizer, load_tokenizer
from autotune.corpus.writer import DatasetWriter
from autotune.errors import BadInput, MachineLacks
from trainer.dataset import Manifest, SourceStatistics

Stages = Callable[[str], AbstractContextManager[Update]]
"""Opens the display of one stage, by its title."""

# A batch of texts to encode: large enough to keep all processors busy, small enough for any memory.
_BATCH_CHARACTERS = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to prepare.

    Args:
        source: Such as ``elf:/usr/bin``.
        out: The directory that is to become the dataset.
        max_functions: Stop after this many distinct functions; None takes all.
        tokenizer: A ``tokenizer.json`` to use; None learns one.
        vocab_size: Words of a learned tokenizer.
        workers: Extraction processes; None is one per processor that this process may use.
        overwrite: Whether a dataset at ``out`` may be replaced.
    """

    source: str
    out: Path
    max_functions: int | None = None
    tokenizer: Path | None = None
    vocab_size: int = DEFAULT_VOCAB_SIZE
    workers: int | None = None
    overwrite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A published dataset and what was left out on the way."""

    directory: Path
    manifest: Manifest
    rejected: tuple[Rejected, ...]
    other_files: int


def prepare(request: Request, stages: Stages) -> Prepared:
    """Build the dataset and publish it.

    Raises:
        BadInput: If the source, the tokenizer or the place cannot be used, or nothing usable was found.
        MachineLacks: If the libraries that read programs are not installed.
    """
    _require_libraries()
    given = load_tokenizer(request.tokenizer) if request.tokenizer else None
    found = find_elf_files(request.source)
    with build_beside(request.out, overwrite=request.overwrite) as build_place:
        with stages("extract functions") as update:
            text = gather_distinct(
                found,
                most=request.max_functions,
                workers=request.workers or len(os.sched_getaffinity(0)),
                scratch=build_place.scratch,
                update=update,
            )
        tokenizer = given or _learn(text, request.vocab_size, stages)
        with stages("encode") as update:
            manifest = _encode(text, tokenizer, build_place.dataset, update)
    return Prepared(directory=request.out, manifest=manifest, rejected=text.rejected, other_files=found.other_files)


def _require_libraries() -> None:
    missing = [name for name in ("capstone", "elftools") if importlib.util.find_spec(name) is None]
    if missing:
        raise MachineLacks(
            f"reading programs needs {' and '.join(missing)}, not installed here",
            next_step="Run: pip install 'encoder-autotune[elf]'",
        )


def _learn(text: DistinctText, vocab_size: int, stages: Stages) -> DatasetTokenizer:
    with stages("learn tokenizer") as update, text.path.open(encoding="ascii") as lines:
        tokenizer = learn_tokenizer(lines, vocab_size=vocab_size, advance=lambda done: update(done, text.functions, ""))
        update(text.functions, text.functions, f"{format_count(tokenizer.vocab_size)} words")
    return tokenizer


def _encode(text: DistinctText, tokenizer: DatasetTokenizer, directory: Path, update: Update) -> Manifest:
    writer = DatasetWriter(directory, tokenizer)
    done = unknown = 0
    try:
        for batch in _batches(text.path):
            for ids in tokenizer.encode(batch):
                unknown += int(np.count_nonzero(ids == tokenizer.special_ids.unk))
                writer.add(ids)
            done += len(batch)
            update(done, text.functions, "")
        if writer.token_bytes == 0:
            raise BadInput("the tokenizer makes no token of these programs", next_step="Leave out --tokenizer.")
        return writer.finish(
            SourceStatistics(
                kind="elf",
                files=text.files,
                rejected_files=len(text.rejected),
                duplicate_samples=text.duplicates,
                raw_bytes=text.raw_bytes,
                token_bytes=writer.token_bytes,
                unknown_tokens=unknown,
            )
        )
    finally:
        writer.close()


def _batches(text: Path) -> Iterator[list[str]]:
    """Lines in groups of about the same number of characters: one function can be as long as a thousand others."""
    batch: list[str] = []
    characters = 0
    with text.open(encoding="ascii") as lines:
        for line in lines:
            batch.append(line.rstrip("\n"))
            characters += len(line)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch
