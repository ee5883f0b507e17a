"""``autotune tune``: from a model and a dataset to a tuned profile and a report, in one command that can be resumed."""

import json
import os
import shlex
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.commands.jobs import DryRun, JobRequest, Slurm, Wait, arguments_of, goes_elsewhere
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
    Window,
)
from autotune.core.defaults import MAX_ROWS, SEQ_LENGTH_TOKENS, TRIAL_TIMEOUT_S, WINDOW_S
from autotune.errors import AutotuneError

if TYPE_CHECKING:
    from autotune.core.tuning import TuningResult
    from autotune.tuning.tune import TuneRequest, Tuning

_PROBE_MINUTES = 3.0
"""Of one model, in the mean: not part of the budget, which it takes from all the same."""
MINUTES, EXPLORING_MINUTES = 15.0, 15.0
"""For each model, by default; and more with ``--explore``."""


class Skippable(StrEnum):
    """A stage that can be left out."""

    ESTIMATE = "estimate"
    PROBE = "probe"
    ACCUMULATION = "accumulation"
    WORKERS = "workers"
    NETWORK = "network"
    BASELINE = "baseline"
    REPORT = "report"


def tune(
    context: typer.Context,
    *,
    model: Models,
    data: Data,
    device: Device = "auto",
    memory: Memory = None,
    seq_length: SeqLength = SEQ_LENGTH_TOKENS,
    precision: Precision = None,
    attention_dropout: AttentionDropout = None,
    global_batch_tokens: GlobalBatchTokens = None,
    ranks: Ranks = None,
    nodes: Annotated[
        int,
        typer.Option(min=1, help="Nodes that the training is to have. With --slurm a second job measures two of them."),
    ] = 1,
    explore: Annotated[
        bool,
        typer.Option(
            "--explore", help="Also search precision, attention, checkpointing, compiling, layout and micro-batch."
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="For everything; probes take what they take. Default: 15 for each model, 30 with --explore."
        ),
    ] = None,
    skip: Annotated[
        list[Skippable] | None,
        typer.Option(
            help="A stage to leave out; repeat for several. Without probe the profile must be there; without "
            "accumulation steps are probed with one micro-batch."
        ),
    ] = None,
    max_rows: MaxRows = MAX_ROWS,
    window_s: Window = WINDOW_S,
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S,
    out: Annotated[Path, typer.Option(help="Directory of the profiles.")] = Path("profiles"),
    slurm: Slurm = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    here: Here = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Make a tuned profile of each model, and a report. Stopped at any point, the same command goes on from there."""
    from autotune.core.units import parse_bytes
    from autotune.search.probe import ProbeRequest
    from autotune.tuning.probe import asked_config
    from autotune.tuning.tune import ORDER, TuneRequest, Tuning
    from trainer.presets import model_settings

    number = os.environ.get("SLURM_JOB_ID")
    skipped = frozenset(skip or ())
    left_out = frozenset(stage for stage in ORDER if stage in {one.value for one in skipped})
    budget = minutes or (MINUTES + EXPLORING_MINUTES * explore) * len(model)
    settings = {
        "seq_length_tokens": seq_length,
        "attention_dropout": attention_dropout,
        "precision": precision,
        "global_batch_tokens": global_batch_tokens,
    }
    probes = tuple(
        ProbeRequest(
            config=asked_config(model_settings(name), **settings),
            data=data,
            reports=reports,
            memory_bytes=None if memory is None else parse_bytes(memory),
            ranks=ranks,
            accumulate=Skippable.ACCUMULATION not in skipped,
            max_rows=max_rows,
            trial_timeout_s=trial_timeout,
            traced=Skippable.ESTIMATE not in skipped,
        )
        for name in model
    )
    request = TuneRequest(
        probes=probes,
        out=out,
        device=device,
        minutes=budget,
        skip=left_out if explore else left_out | {"explore"},
        nodes=nodes,
        window_s=window_s,
    )
    job = JobRequest(
        name="tune",
        purpose=f"Tunes {', '.join(model)}: micro-batch, loader workers, exchange of gradients; writes profiles.",
        ledger=str(reports / "*" / "ledger"),
        expected_minutes=1 + budget + _PROBE_MINUTES * len(model),
        trial_timeout_s=trial_timeout,
        ranks=ranks,
        on_gpus=device != "cpu",
        reports=reports,
    )
    if nodes > 1 and Skippable.NETWORK not in skipped:
        job = replace(job, then=lambda first: _second(job, first, request))
    if goes_elsewhere(context, job, slurm, wait=wait, dry_run=dry_run, as_json=as_json, here=here):
        return
    again = shlex.join(["autotune", *arguments_of(context)])
    result, failed = _run(Tuning(request=request), again if number is None else f"{again} --slurm")
    if number is not None:
        _leave_for_second(number, result, reports)
    _say(result, as_json=as_json)
    if failed:
        raise failed[0]


def _run(tuning: "Tuning", again: str) -> "tuple[TuningResult, list[AutotuneError]]":
    """Run it; whatever ends it says how to go on."""
    try:
        result = tuning.run()
    except AutotuneError:
        if tuning.has_saved:
            sys.stderr.write(f"tune: what was finished is saved; to go on from here: {again}\n")
        raise
    return result, tuning.failed


def _say(result: "TuningResult", *, as_json: bool) -> None:
    from autotune.search.profiles import read_profile
    from autotune.show.answers import answer_json
    from autotune.show.tuning import tuning_text

    profiles = [read_profile(Path(path)).profile for path in result.profiles]
    print(answer_json(result) if as_json else tuning_text(result, profiles))


def tune_between_nodes(
    *,
    tuned: Annotated[Path, typer.Argument(help="What a tuning in a job found.")],
    data: Annotated[Path, typer.Option(help="Dataset directory.")],
    minutes: Annotated[float, typer.Option(help="For the network of each profile.")],
    trial_timeout: Annotated[float, typer.Option(help="Seconds that one trial may take.")],
    reports: Reports,
) -> None:
    """Measure the network of this job's nodes for each profile of a tuning, and write its report anew."""
    from autotune.search.workers import SweepRequest
    from autotune.tuning.tune import measure_between_nodes

    request = SweepRequest(data=data, reports=reports, minutes=minutes, trial_timeout_s=trial_timeout)
    _say(measure_between_nodes(tuned, request), as_json=False)


def _second(first: JobRequest, number: str, request: "TuneRequest") -> JobRequest:
    """The job that measures between nodes, after the one that tunes."""
    from autotune.core.tuning import BUDGET_WEIGHTS

    models = len(request.probes)
    of_all = sum(weight for name, weight in BUDGET_WEIGHTS.items() if name not in request.skip)
    minutes = max(1.0, request.minutes / models * BUDGET_WEIGHTS["network"] / of_all)
    command = [
        "tune-between-nodes", str(_found_by(number, first.reports)), "--data", str(request.probes[0].data),
        "--minutes", f"{minutes:.1f}", "--trial-timeout", f"{first.trial_timeout_s:g}", "--reports", str(first.reports),
    ]  # fmt: skip
    return replace(
        first,
        name="tune-between-nodes",
        purpose=f"Measures the network between two nodes for what job {number} tuned.",
        expected_minutes=1 + 2 * minutes * models,
        nodes=2,
        with_srun=False,
        command=command,
        then=None,
    )


def _leave_for_second(number: str, result: "TuningResult", reports: Path) -> None:
    from autotune.store import write_atomically

    with_baseline = any(stage.name == "baseline" and stage.status == "done" for stage in result.stages)
    found = {"profiles": result.profiles, "report": result.report, "with_baseline": with_baseline}
    write_atomically(_found_by(number, reports), json.dumps(found, indent=1) + "\n")


def _found_by(number: str, reports: Path) -> Path:
    return reports / "jobs" / f"tune-{number}.json"
