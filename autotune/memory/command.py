"""``autotune probe`` and ``autotune estimate``: the largest micro-batch per model, measured and predicted."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from autotune.base.defaults import HEADROOM_SHARE, VOCAB_SIZE
from autotune.console.options import (
    AsJson,
    Checkpointing,
    Layout,
    ModelOptions,
    StepOptions,
    cards,
    grouped,
    make_request,
)
from autotune.console.slurm_job import JobOptions, JobRequest
from autotune.errors import AutotuneError, ExceedsMemory


@grouped
def probe(
    context: typer.Context,
    *,
    options: ModelOptions,
    layout: Layout = None,
    activation_checkpointing: Checkpointing = "none",
    strategy: Annotated[
        Literal["ddp", "zero1", "fsdp2"],
        typer.Option(help="How ranks share the state: not at all, the optimizer's, or the weights too."),
    ] = "ddp",
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the model's layers, as a profile with compile trains.")
    ] = False,
    as_gpu: Annotated[
        str | None,
        typer.Option(help="Measure with the memory of a smaller card, such as h100-nvl-94gb.", autocompletion=cards),
    ] = None,
    accumulate: Annotated[
        bool, typer.Option(help="Let steps have several micro-batches, which needs more memory than one.")
    ] = True,
    headroom: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the largest micro-batch left free.")
    ] = HEADROOM_SHARE,
    out: Annotated[Path | None, typer.Option(help="Profile file; with several models a directory.")] = None,
    job: JobOptions,
) -> None:
    """Find the largest micro-batch that fits in memory.

    Verify that one more sequence does not fit, and measure the throughput of smaller sizes.
    """
    from autotune.base.document import answer_json
    from autotune.machine.gpu_models import find_gpu_model
    from autotune.memory.sections import probe_answer, probe_text
    from autotune.memory.stage import probe_models
    from autotune.trials.session import open_session

    requests = options.probes(
        job.reports,
        {
            "layout": layout,
            "activation_checkpointing": activation_checkpointing,
            "compile": compile,
            "parallel": {"strategy": strategy},
        },
        as_gpu=None if as_gpu is None else find_gpu_model(as_gpu),
        accumulate=accumulate,
        headroom_share=headroom,
    )
    names = [request.config.model.name for request in requests]
    one = out.stem if out is not None and out.suffix == ".toml" else None
    asked = JobRequest(
        name=f"probe-{names[0]}" if len(names) == 1 else "probe",
        purpose=f"Finds the largest micro-batch of {', '.join(names)}, and writes profiles.",
        trial_log=", ".join(str(job.reports / (one or f"{name}-*") / "trials") for name in names),
        expected_minutes=1 + 3 * len(names),  # each ten to twenty trials, most of which end in seconds
        trial_timeout_s=options.trial_timeout,
        ranks=options.ranks,
        on_gpus=options.device != "cpu",
        reports=job.reports,
    )
    if job.submitted_or_rejected(context, asked):
        return
    with open_session(options.device, options.data) as bench:
        probed = probe_models(bench, requests, out)
    answer = {"models": [probe_answer(one) for one in probed]}
    print(answer_json(answer) if job.as_json else probe_text(probed, options.data))


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
    activation_checkpointing: Checkpointing = "none",
    mlm_head: Annotated[
        Literal["sparse", "dense"], typer.Option(help="Places that the prediction head computes.")
    ] = "sparse",
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks: their buckets and communication.")] = 1,
    accumulate: Annotated[
        bool, typer.Option(help="Several micro-batches a step: gradients exist while the next one is computed.")
    ] = True,
    tensor_ranks: Annotated[int, typer.Option(min=1, help="Also show tensor-parallel shares, as formulas.")] = 1,
    pipeline_stages: Annotated[int, typer.Option(min=1, help="Also show pipeline shares, as formulas.")] = 1,
    what_if: Annotated[bool, typer.Option("--what-if", help="Also a table of the alternatives.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict the largest micro-batch without a GPU.

    Show its memory breakdown. The model is traced, not run.
    """
    from autotune.base.document import answer_json
    from autotune.memory.prediction import PredictionRequest, find_target, predict, settings_of_step
    from autotune.memory.sections import estimate_text
    from autotune.profiles.decide.follow_up import command
    from trainer.config.presets import model_settings
    from trainer.record.progress import progress

    named = {name: model_settings(name) for name in options.model}
    length = options.seq_length
    step = {
        name: context.params[name] for name in ("layout", "precision", "attention_dropout", "activation_checkpointing")
    }
    configs = [
        settings_of_step(one, device, seq_length_tokens=length, attention=attention, mlm_head=mlm_head, **step)
        for one in named.values()
    ]
    asked = make_request(PredictionRequest, context, configs=tuple(configs))
    target = find_target(asked)
    with progress("estimate") as update:
        answer, rejected = predict(asked, target, what_if=what_if, update=update)
    unfit = {name for name, error in rejected.items() if isinstance(error, ExceedsMemory)}
    probe = command(
        "probe",
        model=[text for text, one in named.items() if one.name not in unfit],
        data=data or "DIR",
        memory=memory,
        device=device if device == "cpu" else None,
        seq_length=length,
        **step,
        ranks=ranks if ranks > 1 else None,
        max_micro_batch_size=options.max_micro_batch_size,
        accumulate=accumulate,
    )
    unlike = ["the sparse head"] * (mlm_head != "sparse") + ["the attention that it chooses"] * (attention != "auto")
    if unlike:  # for want of an option
        probe += f"  # measures {' and '.join(unlike)}"
    if as_json:
        print(answer_json(answer))
    elif text := estimate_text(answer, probe):
        print(text)
    if rejected:
        raise _refusal(list(rejected.values()), probe)


def _refusal(errors: list[AutotuneError], probe: str) -> AutotuneError:
    """Return the errors of models that were rejected as one error; its exit code is the first one's."""
    from autotune.memory.estimate import CannotTrace

    first = errors[0]
    first.message = "\n".join(error.message for error in errors)
    run = f"Measure it where it is to run: {probe}"
    steps = [run if isinstance(error, CannotTrace) else error.next_step for error in errors]
    first.next_step = "\n  ".join(dict.fromkeys(steps))
    return first
