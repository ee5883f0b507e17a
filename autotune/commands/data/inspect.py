"""``autotune data inspect``: what is in a dataset, and what row lengths do to it."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.options import AsJson
from autotune.show.dataset import dataset_text


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

    found = inspect_dataset(directory, row_tokens or DEFAULT_ROW_TOKENS)
    manifest = found.manifest
    facts = manifest.model_dump(mode="json") | {
        "path": str(directory),
        "dataset_hash": manifest.dataset_hash,
        "sampled": found.sampled,
        "percentiles": {str(name): value for name, value in found.percentiles.items()},
        "mean_tokens": found.mean_tokens,
        "longest_tokens": found.longest_tokens,
        "rows": [dataclasses.asdict(row) for row in found.rows],
    }
    for name in ("train", "validation"):
        split = manifest.train if name == "train" else manifest.validation
        facts[name] |= {"samples": split.samples, "tokens": split.tokens}
    if as_json:
        print(json.dumps(facts))
    else:
        print(dataset_text(facts))
        print(f"next: autotune data verify {shlex.quote(str(directory))}")
