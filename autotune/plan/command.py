"""``autotune plan``: steps, time, cost and memory of a training before it starts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autotune.base.defaults import SEQ_LENGTH_TOKENS
from autotune.base.units import parse_amount, parse_seconds
from autotune.console import options as opt
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.evidence.plan import Goal
    from autotune.profiles.store import StoredProfile
    from trainer.formats.train_config import TrainConfig

_RATE = opt.quantity("--units-per-s", parse_amount, "100K")
_AMOUNTS = ("tokens", "samples", "units")
"""Options that give the length of a training in units of its throughput: in tokens or
samples, or whatever the unit is."""


def plan(
    context: typer.Context,
    *,
    profile: Annotated[
        Path | None,
        typer.Argument(
            metavar="PROFILE",
            help="Profile (TOML), or --model.",
            autocompletion=opt.profiles,
        ),
    ] = None,
    model: Annotated[
        str | None,
        opt.option(
            "NAME",
            "Preset, or path of a config.json or profile; requires --gpu.",
            autocompletion=opt.models,
        ),
    ] = None,
    gpu: opt.Gpu = None,
    nodes: Annotated[int, opt.NODES] = 1,
    ranks: Annotated[
        int | None, opt.gpus_per_node("the profile's; 1 with --model")
    ] = None,
    tokens: Annotated[
        str | None,
        opt.option("N", "Train on this many non-padding tokens, such as 45.2B."),
    ] = None,
    samples: Annotated[
        str | None,
        opt.option("N", "Train on this many samples, if your code counts samples."),
    ] = None,
    units: Annotated[
        str | None,
        opt.option(
            "N", "Train on this many of the profile's own units.", advanced=True
        ),
    ] = None,
    epochs: Annotated[
        float | None, opt.option("N", "Train for this many passes over the data.")
    ] = None,
    steps: Annotated[
        int | None,
        opt.option(
            "N", "Train for this many optimizer steps. Default: the profile's.", min=1
        ),
    ] = None,
    hours: Annotated[
        str | None,
        opt.option("DURATION", "Train for this long, such as 24h.", "--duration"),
    ] = None,
    flops: Annotated[
        str | None,
        opt.option("N", "Train with this many FLOPs, such as 1e20.", advanced=True),
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, opt.option("PRICE", "Price per GPU-hour (any currency).", min=0)
    ] = None,
    data: opt.ProfileData = None,
    global_batch_tokens: Annotated[
        float | None, opt.batch_tokens("the profile's")
    ] = None,
    bandwidth: opt.Bandwidth = None,
    units_per_s: Annotated[
        float | None,
        opt.option(
            "N",
            "Known throughput of one GPU: non-padding tokens/s, or units of your code.",
            advanced=True,
            parser=_RATE,
        ),
    ] = None,
    vocab_size: opt.VocabSize = None,
    seq_length: Annotated[int | None, opt.SEQ_LENGTH] = None,
    precision: opt.Precision = None,
    tensor_ranks: opt.TensorRanks = 2,
    pipeline_stages: opt.PipelineStages = 2,
    as_json: opt.AsJson = False,
) -> None:
    """Predict steps, time, cost and memory of a run.

    Each figure is marked as given, measured, predicted or assumed. --seq-length and
    --precision require --model.
    """
    from autotune.base.answer_json import answer_json
    from autotune.network.scaling import Assumed
    from autotune.plan.inputs import plan
    from autotune.plan.request import PlanRequest
    from autotune.plan.sections import plan_text
    from trainer.formats.progress import progress

    source = _source(model, profile, seq_length, precision)
    asked = opt.make_request(
        PlanRequest,
        context,
        source=source,
        model_argument=model or "",
        goal=_goal(context, _unit(source)),
        ranks_per_node=ranks,
        price_per_device_hour=price_per_gpu_hour,
        links=None if bandwidth is None else Assumed(bits_per_s=bandwidth),
    )
    with progress("plan") as update:
        found = plan(asked, update)
    print(answer_json(found) if as_json else plan_text(found))


def _goal(context: typer.Context, unit: str) -> "Goal | None":
    """Return the length of the training; None if no option gives it.

    Raises:
        UsageError: If several options give it, or it has another unit.
    """
    from autotune.evidence.plan import GOALS, Goal

    names = [*_AMOUNTS, *(kind for kind in GOALS if kind != "units")]
    options = {name: f"--{name}" for name in names} | {"hours": "--duration"}
    given = {
        name: context.params[name] for name in names if context.params[name] is not None
    }
    if not given:
        return None
    if len(given) > 1:
        what = (
            f"{' cannot be used with '.join(options[name] for name in given)}: each"
            " sets the length of the training"
        )
        raise UsageError(what, next_step="Give one of them; the plan shows the others.")
    ((name, said),) = given.items()
    option, amount = options[name], said
    if name in _AMOUNTS and name not in ("units", unit):
        raise UsageError(
            f"{option} cannot be used: this profile counts {unit}",
            next_step=f"Give the number of {unit}: --units {said}",
        )
    if name == "hours":
        amount = opt.quantity(option, parse_seconds, "24h")(said) / 3600
    elif isinstance(said, str):
        amount = opt.quantity(option, parse_amount, "45.2B")(said)
    source = f"{option} {said:g}" if isinstance(said, float) else f"{option} {said}"
    if not 0 < amount < float("inf"):
        raise UsageError(
            f"{source} is not positive", next_step=f"Give {option} a positive number."
        )
    kinds = [kind for kind in GOALS if kind == name] or ["units"]
    return Goal(kind=kinds[0], amount=amount, source=source)


def _unit(source: "StoredProfile | TrainConfig") -> str:
    """Return the unit of throughput of what is planned, as a plural."""
    from autotune.profiles.store import StoredProfile

    return (
        source.profile.subject.unit if isinstance(source, StoredProfile) else "tokens"
    )


def _source(
    model: str | None,
    profile: Path | None,
    seq_length: int | None,
    precision: Literal["bf16", "fp32"] | None,
) -> "StoredProfile | TrainConfig":
    from autotune.profiles.store import read_profile
    from autotune.subjects.mlm.memory.prediction import settings_of_step
    from trainer.formats.presets import model_settings

    if (model is None) == (profile is None):
        raise UsageError(
            (
                "plan requires a profile or --model"
                if model is None
                else f"--model cannot be used with {str(profile)!r}"
            ),
            next_step=(
                "Give one: autotune plan PROFILE, or autotune plan --model bert-120m"
                " --gpu h100-nvl-94gb"
            ),
        )
    if profile is not None:
        if seq_length is not None or precision is not None:
            what = (
                "--seq-length and --precision require --model: a profile sets its own"
            )
            raise UsageError(
                what, next_step="Remove them, or give --model instead of the profile."
            )
        return read_profile(profile)
    settings, length = model_settings(model or ""), seq_length or SEQ_LENGTH_TOKENS
    return settings_of_step(
        settings, "cuda", layout=None, precision=precision, seq_length_tokens=length
    )
