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
    from autotune.show.answers import answer_json, plain
    from autotune.show.dataset import dataset_text

    found = inspect_dataset(directory, row_tokens or DEFAULT_ROW_TOKENS)
    if as_json:
        manifest = found.manifest
        counts = {
            "samples": manifest.train.samples,
            "tokens": manifest.train.tokens,
            "validation_samples": manifest.validation.samples,
            "validation_tokens": manifest.validation.tokens,
        }
        print(answer_json({"path": directory, "dataset_hash": manifest.dataset_hash, **counts, **plain(found)}))
    else:
        print(dataset_text(found))
        print(f"next: autotune data verify {shlex.quote(str(directory))}")
