"""Options that several commands have, each said once; those that go together are a group, a dataclass of them."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from autotune.commands.completion import models, profiles
from autotune.core.defaults import MAX_ROWS, SEQ_LENGTH_TOKENS, TRIAL_TIMEOUT_S, WINDOW_S
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.search.probe import ProbeRequest
    from autotune.search.profiles import StoredProfile
    from autotune.search.workers import SweepRequest

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Reports = Annotated[Path, typer.Option(help="Where ledgers and reports lie.")]
REPORTS = Path("reports")
Here = Annotated[bool, typer.Option("--here", help="Measure here though this looks like a login node.")]
OneProfile = Annotated[Path, typer.Argument(help="The profile.", autocompletion=profiles)]
TrialTimeout = Annotated[float, typer.Option(min=1, help="Seconds that one trial may take.")]
ProfileData = Annotated[
    Path | None, typer.Option(help="Dataset directory. Default: the profile's.", envvar="AUTOTUNE_DATA")
]

SeqLength = Annotated[int, typer.Option(min=8, help="Tokens in a row.")]
Window = Annotated[float, typer.Option("--window", min=0.1, help="Seconds of one measured window.")]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Models to measure on a dataset, and how."""

    model: Annotated[
        list[str], typer.Option(help="Preset or config.json; repeat for several models.", autocompletion=models)
    ]
    data: Annotated[Path, typer.Option(help="Dataset directory.", envvar="AUTOTUNE_DATA")]
    device: Annotated[
        Literal["auto", "cuda", "cpu"],
        typer.Option(help="What to measure; auto takes the first visible GPU, else the CPU."),
    ] = "auto"
    memory: Annotated[
        str | None,
        typer.Option(
            help="Budget of one rank, such as 80GB or 2GiB. Default: free GPU memory less 512 MiB; half the RAM."
        ),
    ] = None
    seq_length: SeqLength = SEQ_LENGTH_TOKENS
    precision: Annotated[
        Literal["bf16", "fp32"] | None,
        typer.Option(help="Of the matrix products. Default: bf16 on GPUs, fp32 on CPUs."),
    ] = None
    attention_dropout: Annotated[
        float | None,
        typer.Option(min=0, max=0.99, help="Instead of the model's: 0 lets GPUs use their fastest kernels."),
    ] = None
    global_batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Non-padding tokens of an optimizer step over all ranks. Default: 524288."),
    ] = None
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local ranks that step together. Default: all visible GPUs; 1 on a CPU.")
    ] = None
    max_rows: Annotated[int, typer.Option(min=1, help="Try no larger micro-batch.")] = MAX_ROWS
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S

    def probes(
        self,
        reports: Path,
        settings: dict[str, object],
        **more: Any,  # noqa: ANN401 - of the request
    ) -> "tuple[ProbeRequest, ...]":
        """Return what to probe of each model, with further ``settings`` of the step, and ``more`` of the probe."""
        from autotune.core.units import parse_bytes
        from autotune.search.probe import ProbeRequest
        from autotune.tuning.probe import asked_config
        from trainer.presets import model_settings

        asked = settings | {
            "seq_length_tokens": self.seq_length,
            "attention_dropout": self.attention_dropout,
            "precision": self.precision,
            "global_batch_tokens": self.global_batch_tokens,
        }
        return tuple(
            ProbeRequest(
                config=asked_config(model_settings(name), **asked),
                data=self.data,
                reports=reports,
                memory_bytes=None if self.memory is None else parse_bytes(self.memory),
                ranks=self.ranks,
                max_rows=self.max_rows,
                trial_timeout_s=self.trial_timeout,
                **more,
            )
            for name in self.model
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """A probed profile to measure windows of."""

    profile: Annotated[
        Path, typer.Option(help="A profile that autotune probe wrote on this machine.", autocompletion=profiles)
    ]
    data: ProfileData = None
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local ranks that train together. Default: as the profile was probed.")
    ] = None
    window_s: Window = WINDOW_S
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S

    def request(
        self,
        stored: "StoredProfile",
        reports: Path,
        minutes: float,
        **more: Any,  # noqa: ANN401 - of the request
    ) -> "SweepRequest":
        """Return which windows to measure, with ``more`` of the sweep."""
        from autotune.search.workers import SweepRequest

        return SweepRequest(
            data=stored.data_dir(self.data),
            reports=reports,
            minutes=minutes,
            ranks=self.ranks,
            window_s=self.window_s,
            trial_timeout_s=self.trial_timeout,
            **more,
        )


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options of each group among its parameters in place of the group."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: dataclasses.fields(kind) for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
        for one in groups.get(parameter.name, ()):
            default = parameter.empty if one.default is dataclasses.MISSING else one.default
            parameters.append(parameter.replace(name=one.name, default=default, annotation=one.type))

    @functools.wraps(command)
    def call(**given: Any) -> None:  # noqa: ANN401 - options of any kind
        for name, options in groups.items():
            given[name] = hints[name](**{one.name: given.pop(one.name) for one in options})
        command(**given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def parsed(parse: Callable[[str], _T], text: str, option: str) -> _T:
    """Return the value of an option that is a figure with a unit.

    Raises:
        UsageError: If it cannot be read.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}", next_step=f"Correct {option}.") from error


def request_of(kind: Callable[..., _T], context: typer.Context, **others: object) -> _T:
    """Return a request: each field that ``others`` does not set is the option of the same name, if there is one."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]  # a dataclass is what constructs it
    return kind(**{name: value for name, value in context.params.items() if name in names} | others)
