"""Options that several commands have, each said once."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from autotune.commands.completion import models, profiles
from autotune.errors import UsageError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Reports = Annotated[Path, typer.Option(help="Where ledgers and reports lie.")]
REPORTS = Path("reports")
Here = Annotated[bool, typer.Option("--here", help="Measure here though this looks like a login node.")]
TrialTimeout = Annotated[float, typer.Option(min=1, help="Seconds that one trial may take.")]
ProfileData = Annotated[
    Path | None, typer.Option(help="Dataset directory. Default: the profile's.", envvar="AUTOTUNE_DATA")
]

ProbedProfile = Annotated[
    Path, typer.Option(help="A profile that autotune probe wrote on this machine.", autocompletion=profiles)
]
ProbedRanks = Annotated[
    int | None, typer.Option(min=1, help="Local ranks that train together. Default: as the profile was probed.")
]
Models = Annotated[
    list[str], typer.Option(help="Preset or config.json; repeat for several models.", autocompletion=models)
]
Data = Annotated[Path, typer.Option(help="Dataset directory.", envvar="AUTOTUNE_DATA")]
Device = Annotated[
    Literal["auto", "cuda", "cpu"],
    typer.Option(help="What to measure; auto takes the first visible GPU, else the CPU."),
]
Memory = Annotated[
    str | None,
    typer.Option(help="Budget of one rank, such as 80GB or 2GiB. Default: free GPU memory less 512 MiB; half the RAM."),
]
SeqLength = Annotated[int, typer.Option(min=8, help="Tokens in a row.")]
Precision = Annotated[
    Literal["bf16", "fp32"] | None,
    typer.Option(help="Of the matrix products. Default: bf16 on GPUs, fp32 on CPUs."),
]
AttentionDropout = Annotated[
    float | None,
    typer.Option(min=0, max=0.99, help="Instead of the model's: 0 lets GPUs use their fastest kernels."),
]
GlobalBatchTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Non-padding tokens of an optimizer step over all ranks. Default: 524288."),
]
Ranks = Annotated[
    int | None, typer.Option(min=1, help="Local ranks that step together. Default: all visible GPUs; 1 on a CPU.")
]
MaxRows = Annotated[int, typer.Option(min=1, help="Try no larger micro-batch.")]
_T = TypeVar("_T")


def parsed(parse: Callable[[str], _T], text: str, option: str) -> _T:
    """Return the value of an option that is a figure with a unit.

    Raises:
        UsageError: If it cannot be read.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}", next_step=f"Correct {option}.") from error


Window = Annotated[float, typer.Option("--window", min=0.1, help="Seconds of one measured window.")]


def request_of(kind: Callable[..., _T], context: typer.Context, **others: object) -> _T:
    """Return a request: each field that ``others`` does not set is the option of the same name, if there is one."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]  # a dataclass is what constructs it
    return kind(**{name: value for name, value in context.params.items() if name in names} | others)
