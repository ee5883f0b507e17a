"""Options that several commands have.

Each is declared once: completions first, then functions that make options, then the
options themselves, and last groups of them as dataclasses, which ``grouped`` spreads
over the parameters of a command. Shells complete models, GPUs, profiles and site files
after an option, and file names if nothing else is offered.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from autotune.base.defaults import (
    MAX_MICRO_BATCH_SIZE,
    SEQ_LENGTH_TOKENS,
    TRIAL_TIMEOUT_S,
    VOCAB_SIZE,
    WINDOW_S,
)
from autotune.base.subject_kinds import subject_kinds
from autotune.base.units import (
    NO_UNIT,
    exact_seconds,
    parse_amount,
    parse_bits_per_s,
    parse_bytes,
    parse_seconds,
)
from autotune.errors import UsageError

_PROFILES = "profiles"
_PYPROJECT = "pyproject.toml"
_NO_PROFILES = (_PYPROJECT, "site.toml")
"""Names of TOML files that are no profiles."""
RequestT = TypeVar("RequestT")


def models(incomplete: str) -> list[str]:
    """Return the presets that begin with ``incomplete``."""
    from trainer.formats.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def cards(incomplete: str) -> list[tuple[str, str]]:
    """Return the GPUs that begin with ``incomplete``, each with its full name."""
    from autotune.machine.gpu_models import GPU_MODELS

    return [
        (gpu_model.key, gpu_model.name)
        for gpu_model in GPU_MODELS
        if gpu_model.key.startswith(incomplete.lower())
    ]


def kinds(incomplete: str) -> list[str]:
    """Return the kinds of subjects that begin with ``incomplete``."""
    return [kind for kind in subject_kinds() if kind.startswith(incomplete)]


def profiles(incomplete: str) -> list[str]:
    """Return profiles with this prefix, except replaced ones.

    They are from the directory that was typed, the current one, and ``profiles/``.
    """
    # A dictionary, to offer each file once and in order.
    names = dict.fromkeys([*_toml_files(incomplete), *_toml_files(f"{_PROFILES}/")])
    return [
        name
        for name in names
        if name.startswith(incomplete)
        and not name.endswith(".previous.toml")
        and Path(name).name not in _NO_PROFILES
    ]


def sites(incomplete: str) -> list[str]:
    """Return TOML files with this prefix, except ``pyproject.toml`` and profiles.

    Profiles are the files in ``profiles/``.
    """
    return [
        name
        for name in _toml_files(incomplete)
        if not name.startswith(f"{_PROFILES}/") and name != _PYPROJECT
    ]


def _toml_files(incomplete: str) -> list[str]:
    """Return the paths of TOML files with this prefix, written as it was typed."""
    directory, slash, prefix = incomplete.rpartition("/")
    with contextlib.suppress(OSError):
        files = Path(directory + slash or ".").expanduser().glob("*.toml")
        names = sorted(file.name for file in files if file.name.startswith(prefix))
        return [f"{directory}{slash}{name}" for name in names]
    return []


def option(
    metavar: str | None, text: str, *names: str, advanced: bool = False, **more: Any
) -> Any:
    """Return an option with a value.

    Without a metavar, help shows the choices. ``--help-all`` also shows advanced
    options.
    """
    return typer.Option(
        *names,
        metavar=metavar,
        help=text,
        rich_help_panel="Advanced" if advanced else None,
        **more,
    )


def flag(name: str, text: str, *, advanced: bool = False) -> Any:
    """Return an option without a value."""
    return option(None, text, name, advanced=advanced)


def quantity(
    name: str, parse: Callable[[str], float], example: str, *, least: float = 0.0
) -> Callable[[Any], float]:
    """Return the parser of an option that takes a number with a unit.

    Its errors show ``example`` as the usual value, or its unit after a bare number.

    Args:
        name: Name of the option.
        parse: Function that reads the text, or raises ``ValueError`` with the reason.
        example: Usual value.
        least: Smallest value.
    """

    def read(text_or_default: str | float) -> float:
        if not isinstance(text_or_default, str):
            return text_or_default
        text = text_or_default
        correct = example
        try:
            value = parse(text)
        except ValueError as error:
            reason = str(error)
            if reason == NO_UNIT:
                unit = example.lstrip("0123456789")
                correct = f"{text.strip()}{unit}"
        else:
            if value >= least:
                return value
            reason = f"is less than {exact_seconds(least)}"
        raise UsageError(
            f"{name} {text!r} {reason}", next_step=f"Write {name} {correct}"
        )

    return read


def duration(
    name: str,
    example: str,
    text: str,
    default_s: float | None = None,
    *,
    least_s: float = 0.0,
    advanced: bool = False,
) -> Any:
    """Return an option that takes a duration with a unit; its value is in seconds."""
    if default_s is not None:
        text += f" Default: {exact_seconds(default_s)}."
    read = quantity(name, parse_seconds, example, least=least_s)
    return option(
        "DURATION", text, name, parser=read, show_default=False, advanced=advanced
    )


def time_limit(default: str) -> Any:
    """Return the option of a measurement's time budget; its value is in seconds."""
    return duration(
        "--time-limit",
        "10min",
        f"Time budget of the measurements. Default: {default}.",
        least_s=1,
    )


def batch_tokens(default: str) -> Any:
    """Return the option of the global batch; its value is a number of tokens."""
    name = "--global-batch-tokens"
    return option(
        "TOKENS",
        f"Non-padding tokens per optimizer step, over all GPUs. Default: {default}.",
        name,
        parser=quantity(name, parse_amount, "512K"),
    )


def gpus_per_node(default: str, *, advanced: bool = False) -> Any:
    """Return the option of the number of GPUs per node."""
    return option(
        "N",
        f"GPUs per node; processes on a CPU. Default: {default}.",
        min=1,
        advanced=advanced,
    )


REPORTS = Path("reports")
NOT_GIVEN = Path("/dev/null")
"""Default of a path that only some forms of a command require."""
NODES = option("N", "Nodes to train on.", min=1, max=8192)
SEQ_LENGTH = option(
    "TOKENS",
    f"Sequence length. Default: {SEQ_LENGTH_TOKENS}.",
    min=8,
    show_default=False,
)
AsJson = Annotated[bool, flag("--json", "Print JSON instead of text.")]
Reports = Annotated[
    Path, option("DIR", "Directory for trial logs and reports.", advanced=True)
]
Study = Annotated[
    Path | None,
    option(
        "FILE",
        "Optuna study to write too: FILE.journal, or an SQLite FILE.db.",
        "--study",
        advanced=True,
    ),
]
RequireApproved = Annotated[
    bool, flag("--require-approved", "Fail unless this exact content was approved.")
]
OneProfile = Annotated[
    Path,
    typer.Argument(metavar="PROFILE", help="Profile (TOML).", autocompletion=profiles),
]
Data = Annotated[Path, option("DIR", "Dataset directory.", envvar="AUTOTUNE_DATA")]
ProfileData = Annotated[
    Path | None,
    option("DIR", "Dataset directory. Default: the profile's.", envvar="AUTOTUNE_DATA"),
]
NodeRanks = Annotated[int | None, gpus_per_node("the profile's")]
Layout = Annotated[
    Literal["packed", "bucketed", "padded"] | None,
    option(
        None,
        "Layout of samples in sequences. Default: packed if supported, else padded.",
        advanced=True,
    ),
]
Checkpointing = Annotated[
    Literal["none", "selective", "full"],
    option(None, "Activation checkpointing: recompute activations in backward."),
]
Compile = Annotated[
    bool | None,
    flag(
        "--compile/--no-compile",
        "Compile the layers with torch.compile. Default: on GPUs.",
        advanced=True,
    ),
]
Precision = Annotated[
    Literal["bf16", "fp32"] | None,
    option(
        None,
        "Precision of matrix multiplications. Default: bf16 on GPUs, fp32 on CPUs.",
        advanced=True,
    ),
]
VocabSize = Annotated[
    int | None,
    option(
        "N",
        f"Vocabulary size if there is no dataset. Default: {VOCAB_SIZE}.",
        min=8,
        advanced=True,
    ),
]
Gpu = Annotated[
    str | None,
    option(
        "NAME",
        "Target GPU, such as h100-nvl-94gb. Default: the machine's or the profile's.",
        autocompletion=cards,
    ),
]
Memory = Annotated[
    int | None,
    option(
        "SIZE",
        "Memory budget per GPU, such as 80GB. Default: all free memory but 512 MiB; on"
        " a CPU half of the RAM.",
        "--memory",
        parser=quantity("--memory", parse_bytes, "80GB"),
    ),
]
Bandwidth = Annotated[
    float | None,
    option(
        "RATE",
        "Assumed line rate of a node's NIC, such as 25Gbit. Default: the measured one.",
        parser=quantity("--bandwidth", parse_bits_per_s, "25Gbit"),
        advanced=True,
    ),
]
MaxMicroBatchSize = Annotated[
    int, option("N", "Largest micro-batch size.", advanced=True, min=1)
]
TensorRanks = Annotated[
    int, option("N", "GPUs per tensor-parallel group (formula).", min=1, advanced=True)
]
PipelineStages = Annotated[
    int, option("N", "Pipeline-parallel stages (formula).", min=1, advanced=True)
]
Device = Annotated[
    Literal["auto", "cuda", "cpu"],
    option(
        None, "Device; auto: GPUs if any, else the CPU, with a warning.", advanced=True
    ),
]
Window = Annotated[
    float,
    duration(
        "--window",
        "2s",
        "Duration of one timed window.",
        WINDOW_S,
        least_s=0.1,
        advanced=True,
    ),
]
TrialTimeout = Annotated[
    float,
    duration(
        "--trial-timeout",
        "600s",
        "Longest duration of a trial.",
        TRIAL_TIMEOUT_S,
        least_s=1,
        advanced=True,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Models, and settings of their training step."""

    model: Annotated[
        list[str],
        option(
            "NAME",
            "Preset, or path of a config.json or profile; repeatable.",
            autocompletion=models,
        ),
    ]
    seq_length: Annotated[int, SEQ_LENGTH] = SEQ_LENGTH_TOKENS
    precision: Precision = None
    attention_dropout: Annotated[
        float | None,
        option(
            "SHARE",
            "Attention dropout; 0 is fastest. Default: the model's.",
            min=0,
            max=0.99,
            advanced=True,
        ),
    ] = None
    max_micro_batch_size: MaxMicroBatchSize = MAX_MICRO_BATCH_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(StepOptions):
    """Models to measure on a dataset, and settings of the measurement."""

    data: Data
    device: Device = "auto"
    memory_bytes: Memory = None
    global_batch_tokens: Annotated[int | None, batch_tokens("524288")] = None
    ranks: Annotated[
        int | None, gpus_per_node("all visible GPUs; 1 on a CPU", advanced=True)
    ] = None
    trial_timeout_s: TrialTimeout = TRIAL_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptions:
    """Functions of your own training code, in the place of a model and a dataset."""

    step: Annotated[
        str | None,
        option(
            "MODULE:FUNCTION",
            "Your own step instead: build_step(micro_batch_size, device).",
        ),
    ] = None
    subject: Annotated[
        str,
        option(
            "KIND",
            "What --step makes: own (a step), transformers, lightning, accelerate.",
            autocompletion=kinds,
            advanced=True,
        ),
    ] = "own"
    per_size: Annotated[
        str | None,
        option(
            "AMOUNT",
            "What one of the size adds to throughput. Default: 1samples; 512tokens.",
            advanced=True,
        ),
    ] = None
    arguments: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "Argument of your functions; repeatable. A,B: each in turn.",
            "--set",
            advanced=True,
        ),
    ] = None
    along: Annotated[
        str | None,
        option(
            "NAME",
            "Argument of --step to search. Default: micro_batch_size.",
            advanced=True,
        ),
    ] = None

    def given(self) -> dict[str, bool]:
        """Return the options that need a function, and whether each is set."""
        return {
            "--subject": self.subject != "own",
            "--per-size": self.per_size is not None,
            "--set": self.arguments is not None,
            "--along": self.along is not None,
        }

    def reject_without_function(self, command: str) -> None:
        """Reject options of your own code if none of its functions is named.

        Raises:
            UsageError: If one is set.
        """
        for name, is_set in self.given().items():
            if is_set:
                raise UsageError(
                    f"{name} applies to your own code, and no function of it is named",
                    next_step=f"{command} --step my_module:build_step {name} ...",
                )

    def reject_others(self, context: typer.Context, kept: Collection[str]) -> None:
        """Reject options that do not apply to your own code.

        Raises:
            UsageError: If an option is set that is not in ``kept``.
        """
        for parameter in context.command.params:
            name = parameter.name or ""
            source = context.get_parameter_source(name)
            if name not in kept and source is not None and source.name == "COMMANDLINE":
                what = (
                    f"{parameter.opts[0]} cannot be used with your own code (--step,"
                    " --loader)"
                )
                next_step = (
                    "Omit it; your own function decides that, if need be by --set"
                    f" {name}=VALUE"
                )
                if name in ("model", "data"):
                    next_step = "Omit it: your functions have their own model and data."
                raise UsageError(what, next_step=next_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedCodeOptions(OwnOptions):
    """Functions of your own training code to tune in all phases."""

    loader: Annotated[
        str | None,
        option(
            "MODULE:FUNCTION",
            "Your own loader, with --step: build_loader(num_workers).",
        ),
    ] = None
    vary: Annotated[
        list[str] | None,
        option(
            "NAME=V1,V2",
            "Values of an argument to search with --explore, the present one first;"
            " repeatable. All must train the same model.",
            "--vary",
            advanced=True,
        ),
    ] = None

    def given(self) -> dict[str, bool]:
        """Return the options that need a function, and whether each is set."""
        return {
            **OwnOptions.given(self),
            "--loader": self.loader is not None,
            "--vary": self.vary is not None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """A probed profile whose training is measured."""

    profile: OneProfile
    data: ProfileData = None
    ranks: NodeRanks = None
    trial_timeout_s: TrialTimeout = TRIAL_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersOptions(SweepOptions):
    """A probed profile, or none if only your own loader is measured."""

    profile: Annotated[
        Path,
        typer.Argument(
            metavar="[PROFILE]",
            help="Profile (TOML).",
            autocompletion=profiles,
            show_default=False,
        ),
    ] = NOT_GIVEN

    def required(self) -> Path:
        """Return the profile; raise ``UsageError`` without one."""
        if self.profile == NOT_GIVEN:
            next_step = (
                "Add it; or measure your own loader: --loader my_module:build_loader"
                " --step-time 120ms"
            )
            raise UsageError("autotune workers requires PROFILE", next_step=next_step)
        return self.profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions(ModelOptions):
    """Models to probe, or none if your own step is."""

    model: Annotated[
        list[str],
        option(
            "NAME",
            "Preset, or path of a config.json or profile; repeatable.",
            autocompletion=models,
        ),
    ] = field(default_factory=list)
    data: Annotated[
        Path,
        option("DIR", "Dataset directory.", envvar="AUTOTUNE_DATA", show_default=False),
    ] = NOT_GIVEN

    def require(self, command: str = "probe") -> None:
        """Raise ``UsageError`` unless a model and a dataset are set.

        ``command`` is the name of the command, for the message.
        """
        missing = None
        if not self.model:
            missing = "--model"
        elif self.data == NOT_GIVEN:
            missing = "--data"
        if missing is not None:
            raise UsageError(
                f"autotune {command} requires {missing}",
                next_step=(
                    f"autotune {command} --model bert-120m --data data; or your own"
                    f" training code: autotune {command} --step my_module:build_step"
                ),
            )


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options of each group as parameters.

    A group is a parameter whose type is a dataclass. Its fields take its place in the
    signature, from which typer makes the options.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: fields(hint) for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
        for group_field in groups.get(parameter.name, ()):
            default: Any = parameter.empty
            if group_field.default_factory is not MISSING:
                default = group_field.default_factory()
            elif group_field.default is not MISSING:
                default = group_field.default
            parameters.append(
                parameter.replace(
                    name=group_field.name,
                    default=default,
                    annotation=group_field.type,
                )
            )

    @functools.wraps(command)
    def call(**values: Any) -> None:
        for name, group_fields in groups.items():
            group_values = {
                group_field.name: values.pop(group_field.name)
                for group_field in group_fields
            }
            values[name] = hints[name](**group_values)
        command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    call.__annotations__ = {
        parameter.name: parameter.annotation for parameter in parameters
    }
    return call


def make_request(
    request_type: Callable[..., RequestT], context: typer.Context, **others: object
) -> RequestT:
    """Return a request.

    Args:
        request_type: Dataclass of the request.
        context: Command line, whose options become the fields of the same name.
        others: Fields that do not come from options.
    """
    field_names = {field.name for field in fields(request_type)}  # type: ignore[arg-type]  # a dataclass is what constructs it
    from_options = {
        name: value for name, value in context.params.items() if name in field_names
    }
    return request_type(**from_options | others)
