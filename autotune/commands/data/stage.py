"""``autotune data stage``: copy a dataset to the node's own disk."""

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.commands.options import AsJson
from autotune.core.units import format_bytes, format_seconds
from autotune.show.answers import answer_json, plain
from trainer.progress import progress

if TYPE_CHECKING:
    from trainer.stage import Staged


def stage(
    *,
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The dataset.")],
    to: Annotated[Path, typer.Option("--to", metavar="LOCAL", help="A directory on the node's own disk.")],
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1.0, help="Longest wait for who copies.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Copy a dataset to local disk, checking every byte. One process of a node copies, others that call this wait."""
    from trainer.stage import stage as stage_dataset

    if _same_file_system(to, source):
        sys.stderr.write(f"note: {to} lies on the same file system as {source}\n")
    started_s = time.monotonic()
    with progress("stage") as update:
        staged = stage_dataset(source, to, timeout_s=timeout_s, update=update)
    seconds = time.monotonic() - started_s
    figures = {"break_even_epochs": staged.break_even_epochs, "seconds": round(seconds, 3)}
    print(answer_json({**plain(staged), **figures}) if as_json else _as_text(staged, seconds))


def _same_file_system(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_dev == other.stat().st_dev
    except OSError:  # what is wrong with either is said when it is used
        return False


def _as_text(staged: "Staged", seconds: float) -> str:
    following = f"next: export AUTOTUNE_DATA={shlex.quote(str(staged.directory))}"
    copied = staged.copied
    if copied is None:
        took = format_seconds(seconds)
        return f"{staged.directory} is there; this process copied nothing ({took})\n{following}"
    lines = [
        str(staged.directory),
        f"copied       {format_bytes(copied.size_bytes)} in {format_seconds(copied.seconds)}, "
        f"{_rate(copied.bytes_per_s)}; one thread reads {_rate(copied.read_bytes_per_s)} "
        f"and writes {_rate(copied.write_bytes_per_s)}",
    ]
    if staged.source_s_per_sample is not None and staged.local_s_per_sample is not None:
        epochs = staged.break_even_epochs
        never = "never: the copy is not faster to read than the source"
        lines += [
            f"one sample   {staged.source_s_per_sample * 1e6:,.0f} us from the source, "
            f"{staged.local_s_per_sample * 1e6:,.0f} us from the copy (measured, one reader at random, cold)",
            f"breaks even  {never if epochs is None else f'after {epochs:,.2f} epochs'}",
        ]
    return "\n".join([*lines, following])


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(round(bytes_per_s))}/s"
