"""``autotune probe``: the largest micro-batch per model under a memory budget, and the throughput curve."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from autotune.base.defaults import HEADROOM_SHARE
from autotune.console.options import Checkpointing, Layout, ModelOptions, cards, grouped
from autotune.console.slurm_job import JobOptions, JobRequest
from autotune.errors import UsageError


@grouped
def probe(
    context: typer.Context,
    *,
    options: ModelOptions,
    layout: Layout = None,
    checkpointing: Checkpointing = "none",
    strategy: Annotated[
        Literal["ddp", "zero1", "fsdp2"],
        typer.Option(help="How ranks share the state: not at all, the optimizer's, or the weights too."),
    ] = "ddp",
    compile_layers: Annotated[
        bool, typer.Option("--compile", help="Compile the model's layers, as a profile with compile_layers trains.")
    ] = False,
    as_gpu: Annotated[
        str | None,
        typer.Option(help="Measure with the memory of a smaller card, such as h100-nvl-94gb.", autocompletion=cards),
    ] = None,
    accumulate: Annotated[
        bool, typer.Option(help="Let steps have several micro-batches, which needs more memory than one.")
    ] = True,
    granularity: Annotated[int, typer.Option(min=1, help="Try multiples of this many rows only.")] = 1,
    headroom: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the largest micro-batch left free.")
    ] = HEADROOM_SHARE,
    out: Annotated[Path | None, typer.Option(help="Profile file; with several models a directory.")] = None,
    job: JobOptions,
) -> None:
    """Find the largest micro-batch that fits, prove that one more does not, and measure throughput below it."""
    from autotune.base.json_text import answer_json
    from autotune.machine.gpu_models import find_card
    from autotune.memory.sections import probe_answer, probe_text
    from autotune.memory.stage import probe_models
    from autotune.trials.session import open_bench

    if granularity > options.max_rows:
        raise UsageError(
            f"--granularity {granularity} leaves nothing to try up to --max-rows {options.max_rows}",
            next_step=f"Use --max-rows {granularity} or more.",
        )
    requests = options.probes(
        job.reports,
        {
            "layout": layout,
            "checkpointing": checkpointing,
            "compile_layers": compile_layers,
            "parallel": {"strategy": strategy},
        },
        as_card=None if as_gpu is None else find_card(as_gpu),
        accumulate=accumulate,
        granularity_rows=granularity,
        headroom_share=headroom,
    )
    names = [request.config.model.name for request in requests]
    one = out.stem if out is not None and out.suffix == ".toml" else None
    asked = JobRequest(
        name=f"probe-{names[0]}" if len(names) == 1 else "probe",
        purpose=f"Finds the largest micro-batch of {', '.join(names)}, and writes profiles.",
        ledger=", ".join(str(job.reports / (one or f"{name}-*") / "ledger") for name in names),
        expected_minutes=1 + 3 * len(names),  # each ten to twenty trials, most of which end in seconds
        trial_timeout_s=options.trial_timeout,
        ranks=options.ranks,
        on_gpus=options.device != "cpu",
        reports=job.reports,
    )
    if job.goes_elsewhere(context, asked):
        return
    with open_bench(options.device, options.data) as bench:
        probed = probe_models(bench, requests, out)
    answer = {"models": [probe_answer(one) for one in probed]}
    print(answer_json(answer) if job.as_json else probe_text(probed, options.data))
