"""``autotune data``: raw data to a tokenised dataset."""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.core.dataset import DEFAULT_VOCAB_SIZE, MIN_VOCAB_SIZE
from autotune.core.units import format_bytes, format_count, format_seconds, format_share
from autotune.errors import UsageError
from autotune.show.histogram import length_histogram
from trainer.progress import progress

if TYPE_CHECKING:
    from autotune.corpus.prepare import Prepared

_SHOWN_REJECTS = 5

def prepare(
    *,
    source: Annotated[str, typer.Argument(help="What to read: elf: and a directory, a file, or a quoted glob.")],
    out: Annotated[Path, typer.Option("--out", help="The directory that is to become the dataset.")],
    max_functions: Annotated[
        int | None, typer.Option("--max-functions", min=1, help="Stop after this many distinct functions.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="A tokenizer.json to use. Default: learn one from the data.")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            min=MIN_VOCAB_SIZE,
            max=2**24,
            help="Most words of the learned tokenizer.",
            show_default=str(DEFAULT_VOCAB_SIZE),
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, max=1024, help="Processes that read files. Default: one per allotted CPU."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the dataset that --out holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Cut the functions out of programs, drop exact duplicates, and store them as token ids."""
    from autotune.corpus.prepare import Request
    from autotune.corpus.prepare import prepare as prepare_dataset

    if tokenizer is not None and vocab_size is not None:
        raise UsageError("--vocab-size has no effect with --tokenizer", next_step="Leave out one of the two.")
    request = Request(
        source=source,
        out=out,
        max_functions=max_functions,
        tokenizer=tokenizer,
        vocab_size=vocab_size or DEFAULT_VOCAB_SIZE,
        workers=workers,
        overwrite=overwrite,
    )
    started_s = time.monotonic()
    prepared = prepare_dataset(request, progress)
    seconds = time.monotonic() - started_s
    _tell_rejects(prepared)
    if as_json:
        print(json.dumps(_as_json(prepared, seconds)))
    else:
        print(_as_text(prepared, seconds))


def _tell_rejects(prepared: "Prepared") -> None:
    for rejected in prepared.rejected[:_SHOWN_REJECTS]:
        # repr: a stranger's file name must not write control characters to a terminal.
        sys.stderr.write(f"left out {str(rejected.path)!r}: {rejected.reason}\n")
    more = len(prepared.rejected) - _SHOWN_REJECTS
    if more > 0:
        sys.stderr.write(f"left out {more} more files (--json lists all)\n")


def _as_json(prepared: "Prepared", seconds: float) -> dict[str, Any]:
    manifest, source = prepared.manifest, prepared.manifest.source
    return {
        "path": str(prepared.directory),
        "dataset_hash": manifest.dataset_hash,
        "samples": manifest.samples,
        "tokens": manifest.tokens,
        "vocab_size": manifest.vocab_size,
        "unknown_tokens": source.unknown_tokens,
        "raw_bytes": source.raw_bytes,
        "token_bytes": source.token_bytes,
        "reduction": 1 - source.token_bytes / source.raw_bytes,
        "duplicates": source.duplicate_samples,
        "files": source.files,
        "other_files": prepared.other_files,
        "rejected": [{"path": str(item.path), "reason": item.reason} for item in prepared.rejected],
        "seconds": round(seconds, 3),
    }


def _as_text(prepared: "Prepared", seconds: float) -> str:
    manifest, source = prepared.manifest, prepared.manifest.source
    less = 1 - source.token_bytes / source.raw_bytes
    size = f"{format_bytes(source.raw_bytes)} -> {format_bytes(source.token_bytes)}"
    facts = {
        "programs -> tokens": f"{size} ({format_share(less)} less) from {format_count(source.files)} files",
        "samples": f"{format_count(manifest.samples)} distinct functions",
        "tokens": f"{format_count(manifest.tokens)}, special tokens not counted",
        "duplicates dropped": format_count(source.duplicate_samples),
        "unknown tokens": f"{format_share(source.unknown_tokens / manifest.tokens)} of all tokens",
        "words": format_count(manifest.vocab_size),
        "left out": f"{len(prepared.rejected)} ELF files, {format_count(prepared.other_files)} other files",
        "took": format_seconds(seconds),
    }
    width = max(map(len, facts))
    histogram = manifest.length_histogram
    return "\n".join(
        [
            *(f"{name:<{width}}  {value}" for name, value in facts.items()),
            "",
            "tokens per sample",
            length_histogram(histogram.edges, histogram.counts),
            "",
            f"next: autotune probe --model bert-mini --data {shlex.quote(str(prepared.directory))} --memory 1GiB",
        ]
    )
