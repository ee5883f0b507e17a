"""``autotune plan``: steps, time, cost and memory of a training before it starts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autotune.base.defaults import SEQ_LENGTH_TOKENS, VOCAB_SIZE
from autotune.console.options import AsJson, ProfileData, cards, make_request, models, parsed, profiles
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.plan.values import Goal
    from autotune.profiles.store import StoredProfile
    from trainer.config.train_config import TrainConfig


def plan(
    context: typer.Context,
    *,
    model: Annotated[
        str | None, typer.Option(help="Preset or config.json; or give --profile.", autocompletion=models)
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A profile: its settings, and what was measured.", autocompletion=profiles)
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Train on so many real tokens, such as 45.2B or 2T.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Train on so many passes over the dataset.")] = None,
    flops: Annotated[
        str | None, typer.Option(metavar="N", help="Train for so many operations by 6·N·D, such as 1e20.")
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Train for so long.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train so many optimizer steps. Default: the profile's.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="The card, such as h100-nvl-94gb. Default: the profile's machine.", autocompletion=cards),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=8192, help="Nodes.")] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, max=64, help="Ranks on each node. Default: the profile's, else 1.")
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(min=0, help="What you pay for a GPU and hour, in any currency.")
    ] = None,
    data: ProfileData = None,
    global_batch_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Real tokens of a step over all ranks. Default: the profile's.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Line rate of a node's network card, such as 25Gbit, where it was not measured.")
    ] = None,
    tokens_per_s: Annotated[
        str | None, typer.Option(metavar="N", help="Real tokens/s of one GPU, if you know better than the plan.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(min=8, help=f"Without --data. Default: {VOCAB_SIZE}.")] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=8, help=f"Tokens in a row, with --model. Default: {SEQ_LENGTH_TOKENS}.")
    ] = None,
    precision: Annotated[
        Literal["bf16", "fp32"] | None, typer.Option(help="Of the matrix products, with --model. Default: bf16.")
    ] = None,
    tensor_ranks: Annotated[int, typer.Option(min=1, help="GPUs of the tensor-parallel formula.")] = 2,
    pipeline_stages: Annotated[int, typer.Option(min=1, help="Of the pipeline formula.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Predict steps, time, cost and memory of a run.

    Each figure is marked as given, measured, predicted or assumed.
    """
    from autotune.base.document import answer_json
    from autotune.base.units import parse_amount, parse_bits_per_s
    from autotune.network.scaling import Assumed
    from autotune.plan.inputs import PlanRequest, plan
    from autotune.plan.sections import plan_text
    from trainer.record.progress import progress

    def amount(text: str | None, option: str) -> float | None:
        return None if text is None else parsed(parse_amount, text, option)

    asked = make_request(
        PlanRequest,
        context,
        source=_source(model, profile, seq_length, precision),
        model_argument=model or "",
        goal=_goal(context),
        ranks_per_node=gpus_per_node,
        price_per_device_hour=price_per_gpu_hour,
        links=None if bandwidth is None else Assumed(bits_per_s=parsed(parse_bits_per_s, bandwidth, "--bandwidth")),
        global_batch_tokens=amount(global_batch_tokens, "--global-batch-tokens"),
        tokens_per_s=amount(tokens_per_s, "--tokens-per-s"),
    )
    with progress("plan") as update:
        found = plan(asked, update)
    print(answer_json(found) if as_json else plan_text(found))


def _goal(context: typer.Context) -> "Goal | None":
    from autotune.base.units import parse_amount
    from autotune.plan.values import GOALS, Goal

    given = {kind: context.params[kind] for kind in GOALS if context.params[kind] is not None}
    if len(given) > 1:
        raise UsageError(
            f"{' and '.join(f'--{kind}' for kind in given)} each say how long to train",
            next_step="Give one of them; the plan says what the others come to.",
        )
    for kind, said in given.items():
        amount = parsed(parse_amount, said, f"--{kind}") if isinstance(said, str) else said
        source = f"--{kind} {said:g}" if isinstance(said, float) else f"--{kind} {said}"
        if not 0 < amount < float("inf"):
            raise UsageError(f"{source}: not a positive number", next_step=f"Correct --{kind}.")
        return Goal(kind=kind, amount=amount, source=source)
    return None


def _source(
    model: str | None, profile: Path | None, seq_length: int | None, precision: Literal["bf16", "fp32"] | None
) -> "StoredProfile | TrainConfig":
    from autotune.memory.prediction import settings_of_step
    from autotune.profiles.store import read_profile
    from trainer.config.presets import model_settings

    if (model is None) == (profile is None):
        raise UsageError(
            "a plan is of a model or of a profile" + ("" if model is None else ", and both were given"),
            next_step="Give one: --model bert-120m --gpu h100-nvl-94gb; or --profile PROFILE.toml.",
        )
    if profile is not None:
        if seq_length is not None or precision is not None:
            raise UsageError(
                "--seq-length and --precision go with --model: a profile has its own",
                next_step="Leave them out, or name the model instead of the profile.",
            )
        return read_profile(profile)
    length = seq_length or SEQ_LENGTH_TOKENS
    settings = model_settings(model or "")
    return settings_of_step(settings, "cuda", layout=None, precision=precision, seq_length_tokens=length)
