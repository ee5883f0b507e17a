"""Commands that find the largest micro-batch of a model.

``autotune probe`` measures it, and ``autotune estimate`` predicts it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autotune.base.defaults import HEADROOM_SHARE, MAX_MICRO_BATCH_SIZE, VOCAB_SIZE
from autotune.base.units import exact_bytes
from autotune.console import options as opt
from autotune.console.slurm_job import JobOptions, JobRequest
from autotune.errors import ExceedsMemory, UsageError

if TYPE_CHECKING:
    from autotune.profiles.store import WrittenProfile
    from autotune.subjects.mlm.memory.probe import MlmProbeRequest

_OWN_STEP_OPTIONS = frozenset(
    {
        "step",
        "subject",
        "per_size",
        "ranks",
        "arguments",
        "along",
        "memory_bytes",
        "headroom",
        "max_micro_batch_size",
        "multiple_of",
        "allow_varying",
        "contents",
        "trial_timeout_s",
        "device",
        "out",
        "time_limit_s",
        "study_file",
        "slurm",
        "wait",
        "dry_run",
        "as_json",
        "here",
        "reports",
    }
)
"""Options of ``autotune probe`` that are allowed with ``--step``."""
_STEP_OPTIONS = (
    "layout",
    "precision",
    "attention_dropout",
    "activation_checkpointing",
    "compile",
)
"""Options with the name of a setting of the step; a probe and an estimate have them."""

Accumulate = Annotated[
    bool,
    opt.option(
        None, "Allow gradient accumulation, which needs more memory.", advanced=True
    ),
]
Strategy = Annotated[
    Literal["ddp", "zero1", "fsdp2"],
    opt.option(
        None,
        "Parallel strategy: zero1 shards the optimizer, fsdp2 everything.",
        advanced=True,
    ),
]
Headroom = Annotated[
    float,
    opt.option(
        "SHARE",
        "Share of the largest micro-batch to leave free.",
        advanced=True,
        min=0,
        max=0.9,
    ),
]
MultipleOf = Annotated[
    int,
    opt.option(
        "N",
        "Try multiples of N only, such as sequence lengths (with --step).",
        advanced=True,
        min=1,
    ),
]
AllowVarying = Annotated[
    bool,
    opt.flag(
        "--allow-varying",
        "Accept steps that differ in memory (with --step).",
        advanced=True,
    ),
]
ContentsAt = Annotated[
    Literal["none", "largest", "both"],
    opt.option(
        None,
        "Show what memory consists of (with --step): at the largest size that fits, or"
        " also at the first that does not.",
        advanced=True,
    ),
]
ProfileToWrite = Annotated[
    Path | None,
    opt.option(
        "PATH",
        "Profile to write; a directory for several models. Default: profiles/.",
    ),
]
TargetDevice = Annotated[
    Literal["cuda", "cpu"],
    opt.option(None, "Target device; cpu requires --memory."),
]
DataForLengths = Annotated[
    Path | None,
    opt.option(
        "DIR", "Dataset, for its vocabulary and lengths.", envvar="AUTOTUNE_DATA"
    ),
]
Attention = Annotated[
    Literal["auto", "varlen", "fa4", "sdpa"],
    opt.option(None, "Attention kernel.", advanced=True),
]
MlmHead = Annotated[
    Literal["sparse", "dense"],
    opt.option(
        None,
        "Compute MLM logits of masked tokens only (sparse) or of all.",
        advanced=True,
    ),
]
AllRanks = Annotated[
    int,
    opt.option("N", "GPUs on all nodes together (elsewhere: GPUs per node).", min=1),
]
WhatIf = Annotated[bool, opt.flag("--what-if", "Add a table of alternative settings.")]


@opt.grouped
def probe(
    context: typer.Context,
    *,
    options: opt.ProbeOptions,
    own: opt.OwnOptions,
    layout: opt.Layout = None,
    activation_checkpointing: opt.Checkpointing = "none",
    strategy: Strategy = "ddp",
    compile: opt.Compile = None,
    gpu: opt.Gpu = None,
    accumulate: Accumulate = True,
    headroom: Headroom = HEADROOM_SHARE,
    multiple_of: MultipleOf = 1,
    allow_varying: AllowVarying = False,
    contents: ContentsAt = "largest",
    time_limit_s: Annotated[float | None, opt.time_limit("none")] = None,
    out: ProfileToWrite = None,
    study_file: opt.Study = None,
    job: JobOptions,
) -> None:
    """Find the largest micro-batch that fits.

    Verify that one more sequence runs out of memory, measure the throughput of smaller
    sizes, and write a profile. With a time limit, fewer sizes are measured. With --gpu,
    memory is capped to that of a smaller GPU. With --step, your own training code is
    probed instead of a model.
    """
    from autotune.machine.gpu_models import find_gpu_model
    from autotune.memory.stage import probe_subjects
    from autotune.subjects.mlm.memory.probe_requests import probe_requests
    from autotune.trials.study import check_study_file

    if study_file is not None:
        check_study_file(study_file)
    if own.step is not None:
        _probe_own_step(context, options, own, job)
        return
    own.reject_without_function("autotune probe")
    options.require()
    settings = {
        name: context.params[name]
        for name in ("layout", "activation_checkpointing", "compile")
    }
    requests = probe_requests(
        options,
        job.reports,
        settings | {"parallel": {"strategy": strategy}},
        accumulate=accumulate,
        headroom_share=headroom,
        as_gpu=None if gpu is None else find_gpu_model(gpu),
        study_file=study_file,
    )
    if job.submitted_or_rejected(context, _probe_job(requests, options, job, out)):
        return
    probed = probe_subjects(options.device, requests, out, time_limit_s=time_limit_s)
    _print_probed(probed, job)


def _probe_own_step(
    context: typer.Context,
    options: opt.ProbeOptions,
    own: opt.OwnOptions,
    job: JobOptions,
) -> None:
    """Find the largest size of your own step, for each combination of arguments."""
    from autotune.memory.probe_request import MAX_SIZE
    from autotune.memory.stage import probe_subjects
    from autotune.memory.subject_probe import SubjectProbeRequest
    from autotune.subjects.requested import requested_subjects

    own.reject_others(context, _OWN_STEP_OPTIONS)
    codes = requested_subjects(own)
    out: Path | None = context.params["out"]
    if len(codes) > 1 and out is not None and out.suffix == ".toml":
        raise UsageError(
            f"--out {out} names one file for {len(codes)} profiles",
            next_step="Pass a directory.",
        )
    max_size = options.max_micro_batch_size
    if max_size == MAX_MICRO_BATCH_SIZE:
        # It is a model's default, which is too small if sizes are sequence lengths.
        max_size = MAX_SIZE
    probes = tuple(
        opt.make_request(
            SubjectProbeRequest,
            context,
            subject=subject,
            ranks=options.ranks or 1,
            headroom_share=context.params["headroom"],
            max_size=max_size,
        )
        for subject in codes
    )
    job_request = JobRequest(
        name=f"probe-{codes[0].name}",
        purpose=f"Finds the largest size of {own.step}, and writes a profile.",
        expected_minutes=1 + 3 * len(codes),
        trial_timeout_s=options.trial_timeout_s,
        ranks=options.ranks or 1,
        on_gpus=options.device != "cpu",
        reports=job.reports,
    )
    if job.submitted_or_rejected(context, job_request):
        return
    written = probe_subjects(
        options.device, probes, out, time_limit_s=context.params["time_limit_s"]
    )
    _print_probed(written, job)


def _print_probed(probed: "Sequence[WrittenProfile]", job: JobOptions) -> None:
    """Print the profiles that a probe wrote, as JSON or as text."""
    from autotune.base.answer_json import answer_json
    from autotune.memory.sections import probe_text
    from autotune.profiles.sections import written_answer

    if job.as_json:
        answers = [written_answer(written) for written in probed]
        print(answer_json({"profiles": answers}))
    else:
        print(probe_text(probed))


def _probe_job(
    requests: "Sequence[MlmProbeRequest]",
    options: opt.ProbeOptions,
    job: JobOptions,
    out: Path | None,
) -> JobRequest:
    """Return the SLURM job that probes these models."""
    names = [request.config.model.name for request in requests]
    # Reports are named as profiles: by ``--out``, or else by model and device, which
    # the job chooses.
    report_names = [f"{name}-*" for name in names]
    if out is not None and out.suffix == ".toml":
        report_names = [out.stem] * len(names)
    trial_logs = [str(job.reports / report / "trials") for report in report_names]
    return JobRequest(
        name=f"probe-{names[0]}" if len(names) == 1 else "probe",
        purpose=(
            f"Finds the largest micro-batch of {', '.join(names)}, and writes profiles."
        ),
        trial_log=", ".join(trial_logs),
        # Each model takes ten to twenty trials, most of which end in seconds.
        expected_minutes=1 + 3 * len(names),
        trial_timeout_s=options.trial_timeout_s,
        ranks=options.ranks,
        on_gpus=options.device != "cpu",
        reports=job.reports,
    )


@opt.grouped
def estimate(
    context: typer.Context,
    *,
    options: opt.StepOptions,
    gpu: opt.Gpu = None,
    memory_bytes: opt.Memory = None,
    device: TargetDevice = "cuda",
    data: DataForLengths = None,
    vocab_size: opt.VocabSize = None,
    layout: opt.Layout = None,
    attention: Attention = "auto",
    activation_checkpointing: opt.Checkpointing = "none",
    mlm_head: MlmHead = "sparse",
    ranks: AllRanks = 1,
    accumulate: Accumulate = True,
    tensor_ranks: opt.TensorRanks = 1,
    pipeline_stages: opt.PipelineStages = 1,
    compile: opt.Compile = None,
    what_if: WhatIf = False,
    as_json: opt.AsJson = False,
) -> None:
    """Predict the largest micro-batch without a GPU.

    Show its memory breakdown. The model is traced, not run.
    """
    from autotune.base.answer_json import answer_json
    from autotune.subjects.mlm.memory.estimate_text import estimate_text
    from autotune.subjects.mlm.memory.prediction import (
        joined_error,
        predict,
        settings_of_step,
    )
    from autotune.subjects.mlm.memory.target import PredictionRequest, find_target
    from trainer.formats.presets import model_settings
    from trainer.formats.progress import progress

    # The other options reach ``PredictionRequest`` and ``_probe_command`` by name, as
    # parameters of the context.
    models = {argument: model_settings(argument) for argument in options.model}
    step_options = {name: context.params[name] for name in _STEP_OPTIONS}
    configs = tuple(
        settings_of_step(
            model,
            device,
            seq_length_tokens=options.seq_length,
            attention=attention,
            mlm_head=mlm_head,
            **step_options,
        )
        for model in models.values()
    )
    request = opt.make_request(
        PredictionRequest, context, configs=configs, vocab_size=vocab_size or VOCAB_SIZE
    )
    target = find_target(request)
    with progress("estimate") as update:
        answer, rejected = predict(request, target, what_if=what_if, update=update)
    too_large = {
        name for name, error in rejected.items() if isinstance(error, ExceedsMemory)
    }
    may_fit = [
        argument for argument, model in models.items() if model.name not in too_large
    ]
    next_command = _probe_command(may_fit, context.params)
    if as_json:
        print(answer_json(answer))
    elif text := estimate_text(answer, next_command):
        print(text)
    if rejected:
        raise joined_error(list(rejected.values()), next_command)


def _probe_command(models: list[str], params: Mapping[str, Any]) -> str:
    """Return the command that measures models with the options of an estimate.

    A shell comment at its end names the settings that a probe chooses itself and so
    may measure differently.

    Args:
        models: Values of ``--model``.
        params: Parameters of ``autotune estimate`` by name.
    """
    from autotune.profiles.decide.follow_up import command

    memory_bytes = params["memory_bytes"]
    words = command(
        "probe",
        model=models,
        data=params["data"] or "DIR",
        memory=exact_bytes(memory_bytes) if memory_bytes else None,
        device="cpu" if params["device"] == "cpu" else None,
        seq_length=params["seq_length"],
        **{name: params[name] for name in _STEP_OPTIONS},
        ranks=params["ranks"] if params["ranks"] > 1 else None,
        max_micro_batch_size=params["max_micro_batch_size"],
        accumulate=params["accumulate"],
    )
    differences = []
    if params["mlm_head"] != "sparse":
        differences.append("the sparse head")
    if params["attention"] != "auto":
        differences.append("its own choice of attention")
    if differences:
        words += f"  # measures {' and '.join(differences)}"
    return words
