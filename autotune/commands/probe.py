"""``autotune probe``: the largest micro-batch per model under a memory budget, and the throughput curve."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from autotune.commands.completion import cards
from autotune.commands.jobs import DryRun, JobRequest, Slurm, Wait, goes_elsewhere
from autotune.commands.options import (
    REPORTS,
    AsJson,
    AttentionDropout,
    Data,
    Device,
    GlobalBatchTokens,
    Here,
    MaxRows,
    Memory,
    Models,
    Precision,
    Ranks,
    Reports,
    SeqLength,
    TrialTimeout,
)
from autotune.core.defaults import HEADROOM_SHARE, MAX_ROWS, SEQ_LENGTH_TOKENS, TRIAL_TIMEOUT_S
from autotune.errors import UsageError

_MINUTES_PER_MODEL = 3
"""What a probe takes in the mean: ten to twenty trials, most of which end in seconds."""


def probe(
    context: typer.Context,
    *,
    model: Models,
    data: Data,
    device: Device = "auto",
    memory: Memory = None,
    seq_length: SeqLength = SEQ_LENGTH_TOKENS,
    layout: Annotated[
        Literal["packed", "bucketed", "padded"] | None,
        typer.Option(help="What a row holds. Default: packed, where this project knows the model's attention."),
    ] = None,
    attention_dropout: AttentionDropout = None,
    precision: Precision = None,
    global_batch_tokens: GlobalBatchTokens = None,
    checkpointing: Annotated[
        Literal["none", "selective", "full"], typer.Option(help="Which activations are computed again in backward.")
    ] = "none",
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
    ranks: Ranks = None,
    accumulate: Annotated[
        bool, typer.Option(help="Let steps have several micro-batches, which needs more memory than one.")
    ] = True,
    granularity: Annotated[int, typer.Option(min=1, help="Try multiples of this many rows only.")] = 1,
    headroom: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the largest micro-batch left free.")
    ] = HEADROOM_SHARE,
    max_rows: MaxRows = MAX_ROWS,
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S,
    out: Annotated[Path | None, typer.Option(help="Profile file; with several models a directory.")] = None,
    slurm: Slurm = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    here: Here = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Find the largest micro-batch that fits, prove that one more does not, and measure throughput below it."""
    from autotune.core.cards import find_card
    from autotune.core.units import parse_bytes
    from autotune.search.probe import ProbeRequest
    from autotune.show.answers import answer_json
    from autotune.show.probe import probe_answer, probe_text
    from autotune.tuning.bench import open_bench
    from autotune.tuning.probe import asked_config, probe_models
    from trainer.presets import model_settings

    if granularity > max_rows:
        raise UsageError(
            f"--granularity {granularity} leaves nothing to try up to --max-rows {max_rows}",
            next_step=f"Use --max-rows {granularity} or more.",
        )
    settings = {
        "seq_length_tokens": seq_length,
        "layout": layout,
        "attention_dropout": attention_dropout,
        "precision": precision,
        "checkpointing": checkpointing,
        "compile_layers": compile_layers,
        "parallel": {"strategy": strategy},
        "global_batch_tokens": global_batch_tokens,
    }
    requests = [
        ProbeRequest(
            config=asked_config(model_settings(name), **settings),
            data=data,
            reports=reports,
            memory_bytes=None if memory is None else parse_bytes(memory),
            as_card=None if as_gpu is None else find_card(as_gpu),
            ranks=ranks,
            accumulate=accumulate,
            granularity_rows=granularity,
            headroom_share=headroom,
            max_rows=max_rows,
            trial_timeout_s=trial_timeout,
        )
        for name in model
    ]
    names = [request.config.model.name for request in requests]
    one = out.stem if out is not None and out.suffix == ".toml" else None
    job = JobRequest(
        name=f"probe-{names[0]}" if len(names) == 1 else "probe",
        purpose=f"Finds the largest micro-batch of {', '.join(names)}, and writes profiles.",
        ledger=", ".join(str(reports / (one or f"{name}-*") / "ledger") for name in names),
        expected_minutes=1 + _MINUTES_PER_MODEL * len(names),
        trial_timeout_s=trial_timeout,
        ranks=ranks,
        on_gpus=device != "cpu",
        reports=reports,
    )
    if goes_elsewhere(context, job, slurm, wait=wait, dry_run=dry_run, as_json=as_json, here=here):
        return
    with open_bench(device, data) as bench:
        probed = probe_models(bench, requests, out)
    print(answer_json({"models": [probe_answer(one) for one in probed]}) if as_json else probe_text(probed, data))
