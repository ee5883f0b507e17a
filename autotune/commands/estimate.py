"""``autotune estimate``: the memory ledger and the predicted largest micro-batch for a card that is not here."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autotune.commands.completion import cards, models
from autotune.commands.options import SEQ_LENGTH_TOKENS, AsJson, SeqLength
from autotune.errors import AutotuneError, DoesNotFit, UsageError

if TYPE_CHECKING:
    from autotune.search.estimated import ProfilesAsked
    from autotune.search.prediction import Asked, Target
    from autotune.show.estimate import Answer

_MAX_ROWS, _HEADROOM = 16_384, 0.03


def estimate(
    *,
    model: Annotated[
        list[str], typer.Option(help="Preset or config.json; repeat for several models.", autocompletion=models)
    ],
    gpu: Annotated[
        str | None,
        typer.Option(
            help="The card, such as h100-nvl-94gb. Default: the first GPU of this machine.", autocompletion=cards
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Budget of one rank, such as 80GB or 24GiB; alone, or less than the GPU has.")
    ] = None,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="What it is to run on; a CPU needs --memory.")
    ] = "cuda",
    data: Annotated[
        Path | None, typer.Option(help="Dataset, for its vocabulary and what its rows hold.", envvar="AUTOTUNE_DATA")
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=8, help="Without --data.")] = 30_522,
    seq_length: SeqLength = SEQ_LENGTH_TOKENS,
    layout: Annotated[Literal["packed", "bucketed", "padded"] | None, typer.Option(help="What a row holds.")] = None,
    precision: Annotated[Literal["bf16", "fp32"] | None, typer.Option(help="Of the matrix products.")] = None,
    attention: Annotated[Literal["auto", "varlen", "sdpa"], typer.Option(help="Kernel of the attention.")] = "auto",
    attention_dropout: Annotated[
        float | None, typer.Option(min=0, max=0.99, help="Instead of the model's: 0 lets GPUs use varlen.")
    ] = None,
    checkpointing: Annotated[
        Literal["none", "selective", "full"], typer.Option(help="Which activations are computed again in backward.")
    ] = "none",
    head: Annotated[
        Literal["masked", "dense"], typer.Option(help="Places that the prediction head computes.")
    ] = "masked",
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks: their buckets and communication.")] = 1,
    accumulate: Annotated[
        bool, typer.Option(help="Several micro-batches a step: gradients exist while the next one is computed.")
    ] = True,
    tensor_ranks: Annotated[int, typer.Option(min=1, help="Also show tensor-parallel shares, as formulas.")] = 1,
    pipeline_stages: Annotated[int, typer.Option(min=1, help="Also show pipeline shares, as formulas.")] = 1,
    max_rows: Annotated[int, typer.Option(min=1, help="Look no further.")] = _MAX_ROWS,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write a profile in which nothing is measured: a .toml file, or a directory."),
    ] = None,
    global_batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --out: real tokens of an optimizer step over all ranks. Default: those of 256 samples, without "
            "--data of 256 rows.",
        ),
    ] = None,
    headroom: Annotated[
        float | None,
        typer.Option(min=0, max=0.9, help=f"With --out: share of the rows left free. Default: {_HEADROOM}."),
    ] = None,
    what_if: Annotated[bool, typer.Option("--what-if", help="Also a table of the alternatives.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict the largest micro-batch that fits, and where the memory goes, without a GPU and without running it."""
    from autotune.decide.probe_command import probe_command
    from autotune.search.estimated import profile_places, write_profiles
    from autotune.search.prediction import Asked, Choices, find_target, predict
    from autotune.show.answers import answer_json
    from autotune.show.answers.estimate import estimate_answer
    from autotune.show.estimate import estimate_text
    from trainer.presets import model_settings
    from trainer.progress import progress

    asked = Asked(
        models=tuple(model_settings(name) for name in model),
        gpu=gpu,
        memory=memory,
        device=device,
        data=data,
        vocab_size=vocab_size,
        seq_length_tokens=seq_length,
        ranks=ranks,
        accumulate=accumulate,
        tensor_ranks=tensor_ranks,
        pipeline_stages=pipeline_stages,
        max_rows=max_rows,
    )
    choices = Choices(
        layout=layout,
        precision=precision or ("bf16" if device == "cuda" else "fp32"),
        attention=attention,
        attention_dropout=attention_dropout,
        checkpointing=checkpointing,
        head=head,
    )
    target = find_target(asked)
    wish = _wish(asked, target, out, headroom, global_batch_tokens)
    places = {} if wish is None else profile_places(wish, choices)
    with progress("estimate") as update:
        answer = predict(asked, choices, target, what_if=what_if, update=update)
    written = () if wish is None else write_profiles(answer, wish, places)
    options: dict[str, object] = {
        "data": data or "DIR",
        "memory": memory,
        "device": device if device == "cpu" else None,
        "seq-length": seq_length if seq_length != SEQ_LENGTH_TOKENS else None,
        "layout": layout,
        "precision": precision,
        "attention-dropout": attention_dropout,
        "checkpointing": checkpointing if checkpointing != "none" else None,
        "ranks": ranks if ranks > 1 else None,
        "max-rows": max_rows if max_rows != _MAX_ROWS else None,
        "accumulate": accumulate,
    }
    unlike = {"the masked head": head != "masked", "the attention that it chooses": attention != "auto"}
    texts = {one.name: text for text, one in zip(model, asked.models, strict=True)}
    unfit = {name for name, error in answer.refused if isinstance(error, DoesNotFit)}
    every = _probe_command({"model": [texts[name] for name in texts if name not in unfit], **options}) + _remark(unlike)
    each = [
        probe_command(one.profile, str(one.path), model=texts[one.profile.train.model.name], data=str(data or "DIR"))
        + _remark(unlike)
        for one in written
    ]
    if as_json:
        print(answer_json(estimate_answer(answer, written)))
    elif text := estimate_text(answer, each or [every], written):
        print(text)
    if answer.refused:
        raise _refusal(answer, every)


def _wish(
    asked: "Asked", target: "Target", out: Path | None, headroom: float | None, global_batch_tokens: int | None
) -> "ProfilesAsked | None":
    """Which profiles are to be written; None for none at all."""
    from autotune.search.estimated import ProfilesAsked

    if out is None:
        idle = {"--headroom": headroom, "--global-batch-tokens": global_batch_tokens}
        for option, value in idle.items():
            if value is not None:
                raise UsageError(
                    f"{option} is for the profile, and none is to be written", next_step="Say where: --out profiles"
                )
        return None
    return ProfilesAsked(
        asked=asked,
        target=target,
        out=out,
        headroom_share=_HEADROOM if headroom is None else headroom,
        global_batch_tokens=global_batch_tokens,
    )


def _remark(unlike: dict[str, bool]) -> str:
    """In what the probe differs from what was predicted, for want of an option."""
    differs = [what for what, is_so in unlike.items() if is_so]
    return f"  # measures {' and '.join(differs)}" if differs else ""


def _probe_command(options: dict[str, object]) -> str:
    """The probe that measures what was predicted."""
    words = ["autotune", "probe"]
    for name, value in options.items():
        if isinstance(value, bool):
            words += [] if value else [f"--no-{name}"]
            continue
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            words += [f"--{name}", str(one)]
    return shlex.join(words)


def _refusal(answer: "Answer", probe: str) -> AutotuneError:
    """What is wrong with the models that were refused, as one error; the exit code is the first one's."""
    from autotune.search.estimate import CannotTrace

    errors = [error for _, error in answer.refused]
    first = errors[0]
    first.message = "\n".join(error.message for error in errors)
    run = f"Measure it where it is to run: {probe}"
    steps = [run if isinstance(error, CannotTrace) else error.next_step for error in errors]
    first.next_step = "\n  ".join(dict.fromkeys(steps))
    return first
