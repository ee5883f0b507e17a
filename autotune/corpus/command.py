"""``autotune data``: raw data to a tokenised dataset, and what is done with one."""

import contextlib
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.base.json_text import answer_json, plain
from autotune.base.units import format_bytes, format_count, format_seconds
from autotune.base.wording import per_s
from autotune.console.options import AsJson
from autotune.corpus.prepare_command import prepare
from autotune.corpus.sections import counts_of, dataset_text
from autotune.errors import BadInput
from trainer.record.progress import progress

if TYPE_CHECKING:
    from trainer.staging.stage import Staged

_SHOWN_FAULTS = 20
Dataset = Annotated[Path, typer.Argument(metavar="DIR", help="The dataset.")]

app = typer.Typer(
    no_args_is_help=True,
    help="Prepare a tokenised dataset, look at it, check it, and copy it to a local disk.",
    rich_markup_mode=None,
)
app.command("prepare")(prepare)


@app.command("inspect")
def inspect(
    *,
    directory: Dataset,
    row_tokens: Annotated[
        list[int] | None,
        typer.Option(min=8, max=2**20, help="A row length to consider; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show counts, lengths, and the padding, cutting and packing of rows of some lengths."""
    from autotune.corpus.verify import DEFAULT_ROW_TOKENS
    from autotune.corpus.verify import inspect as inspect_dataset

    found = inspect_dataset(directory, row_tokens or DEFAULT_ROW_TOKENS)
    if as_json:
        print(answer_json({**counts_of(directory, found.manifest), **plain(found)}))
    else:
        print(dataset_text(found))
        print(f"next: autotune data verify {shlex.quote(str(directory))}")


@app.command("verify")
def verify(*, directory: Dataset, as_json: AsJson = False) -> None:
    """Read a whole dataset and check every hash, offset and id. Ends with 3 when anything is wrong."""
    from autotune.corpus.verify import verify as verify_dataset

    found = verify_dataset(directory, progress)
    if as_json:
        said = {"path": directory, "dataset_hash": found.manifest.dataset_hash, "files": found.files}
        print(answer_json({**said, "bytes_read": found.bytes_read, "faults": found.faults}))
    else:
        for fault in found.faults[:_SHOWN_FAULTS]:
            print(f"{fault.file!r}: {fault.what}")
    if found.faults:
        files = sorted({fault.file for fault in found.faults})
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        raise BadInput(
            f"{directory} is damaged: {len(found.faults)} faults in {', '.join(map(repr, files[:3]))}{more}",
            next_step="Copy these files again from where they came from, or prepare the dataset again.",
        )
    if not as_json:
        samples = found.manifest.train.samples + found.manifest.validation.samples
        size = format_bytes(found.bytes_read)
        print(f"{directory} is whole: {format_count(samples)} samples, {found.files} files, {size} read")


@app.command("stage")
def stage(
    *,
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The dataset.")],
    to: Annotated[Path, typer.Option(metavar="LOCAL", help="A directory on the node's own disk.")],
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Longest wait for who copies.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Copy a dataset to local disk, checking every byte. One process of a node copies, others that call this wait."""
    from trainer.staging.stage import stage as stage_dataset

    with contextlib.suppress(OSError):  # what is wrong with either is said when it is used
        if to.stat().st_dev == source.stat().st_dev:
            sys.stderr.write(f"note: {to} lies on the same file system as {source}\n")
    started_s = time.monotonic()
    with progress("stage") as update:
        staged = stage_dataset(source, to, timeout_s=timeout_s, update=update)
    seconds = time.monotonic() - started_s
    figures = {"break_even_epochs": staged.break_even_epochs, "seconds": round(seconds, 3)}
    print(answer_json({**plain(staged), **figures}) if as_json else _staged_text(staged, seconds))


def _staged_text(staged: "Staged", seconds: float) -> str:
    following = f"next: export AUTOTUNE_DATA={shlex.quote(str(staged.directory))}"
    copied = staged.copied
    if copied is None:
        took = format_seconds(seconds)
        return f"{staged.directory} is there; this process copied nothing ({took})\n{following}"
    lines = [
        str(staged.directory),
        f"copied       {format_bytes(copied.size_bytes)} in {format_seconds(copied.seconds)}, "
        f"{per_s(copied.size_bytes / copied.seconds)}; one thread reads {per_s(copied.size_bytes / copied.read_s)} "
        f"and writes {per_s(copied.size_bytes / copied.write_s)}",
    ]
    if staged.source_s_per_sample is not None and staged.local_s_per_sample is not None:
        epochs = staged.break_even_epochs
        worth = "never: the copy is not faster to read than the source"
        lines += [
            f"one sample   {staged.source_s_per_sample * 1e6:,.0f} us from the source, "
            f"{staged.local_s_per_sample * 1e6:,.0f} us from the copy (measured, one reader at random, cold)",
            f"breaks even  {worth if epochs is None else f'after {epochs:,.2f} epochs'}",
        ]
    return "\n".join([*lines, following])
