"""``autotune data inspect``: what is in a dataset, and what row lengths do to it."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.options import AsJson


def inspect(
    *,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The dataset.")],
    row_tokens: Annotated[
        list[int] | None,
        typer.Option("--row-tokens", min=8, max=2**20, help="A row length to consider; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show counts, lengths, and the padding, cutting and packing of rows of some lengths."""
    from autotune.corpus.inspect import DEFAULT_ROW_TOKENS
    from autotune.corpus.inspect import inspect as inspect_dataset
    from autotune.show.answers import answer_json, fields_of
    from autotune.show.answers.data import InspectAnswer, InspectedRowLength, inspected_split
    from autotune.show.dataset import dataset_text

    found = inspect_dataset(directory, row_tokens or DEFAULT_ROW_TOKENS)
    manifest = found.manifest
    answer = InspectAnswer(
        schema_version=manifest.schema_version,
        dtype=manifest.dtype,
        vocab_size=manifest.vocab_size,
        used_vocab_size=manifest.used_vocab_size,
        special_ids=manifest.special_ids,
        tokenizer_sha256=manifest.tokenizer_sha256,
        train=inspected_split(manifest.train),
        validation=inspected_split(manifest.validation),
        source=manifest.source,
        path=str(directory),
        dataset_hash=manifest.dataset_hash,
        sampled=found.sampled,
        percentiles={str(name): value for name, value in found.percentiles.items()},
        mean_tokens=found.mean_tokens,
        longest_tokens=found.longest_tokens,
        rows=tuple(InspectedRowLength(**fields_of(row)) for row in found.rows),
    )
    if as_json:
        print(answer_json(answer))
    else:
        print(dataset_text(answer))
        print(f"next: autotune data verify {shlex.quote(str(directory))}")
