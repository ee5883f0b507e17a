"""``autotune estimate``: the memory ledger and the predicted largest micro-batch for a card that is not here."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from autotune.base.defaults import VOCAB_SIZE
from autotune.console.options import AsJson, Checkpointing, Layout, StepOptions, cards, grouped, request_of
from autotune.errors import AutotuneError, DoesNotFit


@grouped
def estimate(
    context: typer.Context,
    *,
    options: StepOptions,
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
    vocab_size: Annotated[int, typer.Option(min=8, help="Without --data.")] = VOCAB_SIZE,
    layout: Layout = None,
    attention: Annotated[Literal["auto", "varlen", "sdpa"], typer.Option(help="Kernel of the attention.")] = "auto",
    checkpointing: Checkpointing = "none",
    head: Annotated[
        Literal["masked", "dense"], typer.Option(help="Places that the prediction head computes.")
    ] = "masked",
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks: their buckets and communication.")] = 1,
    accumulate: Annotated[
        bool, typer.Option(help="Several micro-batches a step: gradients exist while the next one is computed.")
    ] = True,
    tensor_ranks: Annotated[int, typer.Option(min=1, help="Also show tensor-parallel shares, as formulas.")] = 1,
    pipeline_stages: Annotated[int, typer.Option(min=1, help="Also show pipeline shares, as formulas.")] = 1,
    what_if: Annotated[bool, typer.Option("--what-if", help="Also a table of the alternatives.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict the largest micro-batch that fits, and where the memory goes, without a GPU and without running it."""
    from autotune.base.json_text import answer_json
    from autotune.memory.estimate_sections import estimate_text
    from autotune.memory.prediction import PredictionRequest, find_target, predict, settings_of_step
    from autotune.profiles.decide.next_command import command
    from trainer.config.presets import model_settings
    from trainer.record.progress import progress

    named = {name: model_settings(name) for name in options.model}
    length = options.seq_length
    step = {name: context.params[name] for name in ("layout", "precision", "attention_dropout", "checkpointing")}
    configs = [
        settings_of_step(one, device, seq_length_tokens=length, attention=attention, head=head, **step)
        for one in named.values()
    ]
    asked = request_of(PredictionRequest, context, configs=tuple(configs))
    target = find_target(asked)
    with progress("estimate") as update:
        answer, refused = predict(asked, target, what_if=what_if, update=update)
    unfit = {name for name, error in refused.items() if isinstance(error, DoesNotFit)}
    probe = command(
        "probe",
        model=[text for text, one in named.items() if one.name not in unfit],
        data=data or "DIR",
        memory=memory,
        device=device if device == "cpu" else None,
        seq_length=length,
        **step,
        ranks=ranks if ranks > 1 else None,
        max_rows=options.max_rows,
        accumulate=accumulate,
    )
    unlike = ["the masked head"] * (head != "masked") + ["the attention that it chooses"] * (attention != "auto")
    if unlike:  # for want of an option
        probe += f"  # measures {' and '.join(unlike)}"
    if as_json:
        print(answer_json(answer))
    elif text := estimate_text(answer, probe):
        print(text)
    if refused:
        raise _refusal(list(refused.values()), probe)


def _refusal(errors: list[AutotuneError], probe: str) -> AutotuneError:
    """What is wrong with the models that were refused, as one error; the exit code is the first one's."""
    from autotune.memory.estimate import CannotTrace

    first = errors[0]
    first.message = "\n".join(error.message for error in errors)
    run = f"Measure it where it is to run: {probe}"
    steps = [run if isinstance(error, CannotTrace) else error.next_step for error in errors]
    first.next_step = "\n  ".join(dict.fromkeys(steps))
    return first
