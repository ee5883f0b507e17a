"""Options that several commands have, each declared once; those that belong together are a group, a dataclass of them.

Shells complete models, GPUs, profiles and site files after an option, and file names if nothing else is offered.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from autotune.base.defaults import MAX_MICRO_BATCH_SIZE, SEQ_LENGTH_TOKENS, TRIAL_TIMEOUT_S
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.memory.measure import ProbeRequest
    from autotune.profiles.store import StoredProfile
    from autotune.workers.values import SweepRequest

_PROFILES = "profiles"
_NO_PROFILES = ("pyproject.toml", "site.toml")


def models(incomplete: str) -> list[str]:
    """Return the presets that begin with ``incomplete``."""
    from trainer.config.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def cards(incomplete: str) -> list[tuple[str, str]]:
    """Return the GPUs that begin with ``incomplete``, each with its full name."""
    from autotune.machine.gpu_models import GPU_MODELS

    return [(gpu_model.key, gpu_model.name) for gpu_model in GPU_MODELS if gpu_model.key.startswith(incomplete.lower())]


def profiles(incomplete: str) -> list[str]:
    """Return profiles with this prefix, except replaced ones: from the directory typed, here, and ``profiles/``."""
    return [
        name
        for name in dict.fromkeys([*_tables(incomplete), *_tables(f"{_PROFILES}/")])
        if name.startswith(incomplete) and not name.endswith(".previous.toml") and Path(name).name not in _NO_PROFILES
    ]


def sites(incomplete: str) -> list[str]:
    """Return TOML files with this prefix, except ``pyproject.toml`` and those in ``profiles/``."""
    return [name for name in _tables(incomplete) if not name.startswith(f"{_PROFILES}/") and name != _NO_PROFILES[0]]


def _tables(incomplete: str) -> list[str]:
    directory, slash, begun = incomplete.rpartition("/")
    try:
        names = sorted(entry.name for entry in Path(directory + slash or ".").expanduser().glob("*.toml"))
    except OSError:
        return []
    return [f"{directory}{slash}{name}" for name in names if name.startswith(begun)]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Reports = Annotated[Path, typer.Option(help="Where trial logs and reports lie.")]
REPORTS = Path("reports")
OneProfile = Annotated[Path, typer.Argument(help="The profile.", autocompletion=profiles)]
TrialTimeout = Annotated[float, typer.Option(min=1, help="Seconds that one trial may take.")]
ProfileData = Annotated[
    Path | None, typer.Option(help="Dataset directory. Default: the profile's.", envvar="AUTOTUNE_DATA")
]
NodeRanks = Annotated[int | None, typer.Option(min=1, help="Ranks on each node. Default: as the profile was measured.")]
Layout = Annotated[
    Literal["packed", "bucketed", "padded"] | None,
    typer.Option(help="What a row holds. Default: packed, where this project knows the model's attention."),
]
Checkpointing = Annotated[
    Literal["none", "selective", "full"], typer.Option(help="Which activations are computed again in backward.")
]
Window = Annotated[float, typer.Option("--window", min=0.1, help="Seconds of one measured window.")]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Models, and settings of their training step."""

    model: Annotated[
        list[str], typer.Option(help="Preset or config.json; repeat for several models.", autocompletion=models)
    ]
    seq_length: Annotated[int, typer.Option(min=8, help="Tokens in a row.")] = SEQ_LENGTH_TOKENS
    precision: Annotated[
        Literal["bf16", "fp32"] | None,
        typer.Option(help="Of the matrix products. Default: bf16 on GPUs, fp32 on CPUs."),
    ] = None
    attention_dropout: Annotated[
        float | None,
        typer.Option(min=0, max=0.99, help="Instead of the model's: 0 lets GPUs use their fastest kernels."),
    ] = None
    max_micro_batch_size: Annotated[int, typer.Option(min=1, help="Try no larger micro-batch.")] = MAX_MICRO_BATCH_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(StepOptions):
    """Models to measure on a dataset, and settings of the measurement."""

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
    global_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Non-padding tokens of an optimizer step over all ranks. Default: 524288.")
    ] = None
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local ranks that step together. Default: all visible GPUs; 1 on a CPU.")
    ] = None
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S

    def probes(
        self,
        reports: Path,
        settings: dict[str, object],
        **more: Any,  # noqa: ANN401 - of the request
    ) -> "tuple[ProbeRequest, ...]":
        """Return a probe request for each model, with further ``settings`` of the step, and ``more`` of the probe."""
        from autotune.base.units import parse_bytes
        from autotune.memory.measure import ProbeRequest
        from autotune.memory.stage import requested_config
        from trainer.config.presets import model_settings

        asked = settings | {
            "seq_length_tokens": self.seq_length,
            "attention_dropout": self.attention_dropout,
            "precision": self.precision,
            "global_batch_tokens": self.global_batch_tokens,
        }
        return tuple(
            ProbeRequest(
                config=requested_config(model_settings(name), **asked),
                data=self.data,
                reports=reports,
                memory_bytes=None if self.memory is None else parse_bytes(self.memory),
                ranks=self.ranks,
                max_micro_batch_size=self.max_micro_batch_size,
                trial_timeout_s=self.trial_timeout,
                **more,
            )
            for name in self.model
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """A probed profile whose training is measured."""

    profile: Annotated[
        Path, typer.Option(help="A profile that autotune probe wrote on such a machine.", autocompletion=profiles)
    ]
    data: ProfileData = None
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks on each node. Default: as the profile was probed.")
    ] = None
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S

    def request(
        self,
        stored: "StoredProfile",
        reports: Path,
        minutes: float,
        **more: Any,  # noqa: ANN401 - of the request
    ) -> "SweepRequest":
        """Return the request for a sweep of timed windows, with ``more`` of its fields."""
        from autotune.workers.values import SweepRequest

        return SweepRequest(
            data=stored.data_dir(self.data),
            reports=reports,
            minutes=minutes,
            ranks=self.ranks,
            trial_timeout_s=self.trial_timeout,
            **more,
        )


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options of each group as parameters in place of the group."""
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
    """Return the value of an option that is a number with a unit.

    Raises:
        UsageError: If it cannot be parsed.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}", next_step=f"Correct {option}.") from error


def make_request(kind: Callable[..., _T], context: typer.Context, **others: object) -> _T:
    """Return a request; fields that ``others`` does not set come from the options of the same name, if they exist."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]  # a dataclass is what constructs it
    return kind(**{name: value for name, value in context.params.items() if name in names} | others)
