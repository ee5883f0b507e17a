"""``autotune tune``: probe, loader workers, exchange between local ranks, what that is worth, report; resumable."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from autotune.commands.jobs import DryRun, JobRequest, Slurm, Wait, arguments_of, submitted
from autotune.commands.options import REPORTS, TRIAL_TIMEOUT_S, AsJson, Here, Reports, TrialTimeout
from autotune.errors import EXIT_INTERRUPTED, InternalError, UsageError

_PROBE_MINUTES = 4.0
_BASELINE_MINUTES = 2.0
"""At most: what the settings are worth is no tuning, and most of the time goes to the slow ones."""
_REPORT = "report.html"


def tune(
    context: typer.Context,
    *,
    model: Annotated[list[str], typer.Option(help="Preset or config.json; repeat for several models.")],
    data: Annotated[Path, typer.Option(help="Dataset directory.", envvar="AUTOTUNE_DATA")],
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option(help="What to measure.")] = "auto",
    memory: Annotated[str | None, typer.Option(help="Budget of one rank, such as 94GB; as probe takes it.")] = None,
    seq_length: Annotated[int, typer.Option(min=8, help="Tokens in a row.")] = 512,
    precision: Annotated[Literal["bf16", "fp32"] | None, typer.Option(help="Of the matrix products.")] = None,
    global_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Real tokens of an optimizer step over all ranks.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local ranks. Default: all visible GPUs; 1 on a CPU.")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Try no larger micro-batch.")] = 16384,
    minutes: Annotated[float, typer.Option(min=0.1, help="For the loader workers, and for the exchange, each.")] = 10.0,
    workers: Annotated[bool, typer.Option(help="Whether to find the number of loader workers.")] = True,
    network: Annotated[bool, typer.Option(help="Whether local ranks' exchange is tuned, where there are two.")] = True,
    baseline: Annotated[bool, typer.Option(help="Whether to measure what the tuned settings are worth.")] = True,
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S,
    out: Annotated[Path, typer.Option(help="Directory of the profiles.")] = Path("profiles"),
    between_nodes: Annotated[
        bool, typer.Option("--between-nodes", help="With --slurm: a second job measures the network of two nodes.")
    ] = False,
    slurm: Slurm = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    here: Here = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Make a tuned profile of each model, and a report. Stopped at any point, the same command goes on from there."""
    from autotune.commands.login_node import refuse_login_node
    from autotune.store import write_atomically

    number = os.environ.get("SLURM_JOB_ID")
    baseline_minutes = min(_BASELINE_MINUTES, minutes) if baseline else 0.0
    stages = 1 + (minutes * (int(workers) + int(network)) + baseline_minutes) / _PROBE_MINUTES
    job = JobRequest(
        name="tune",
        purpose=f"Tunes {', '.join(model)}: micro-batch, loader workers, exchange of gradients; writes profiles.",
        ledger=str(reports / "*" / "ledger"),
        expected_minutes=1 + round(_PROBE_MINUTES * stages * len(model)),
        trial_timeout_s=trial_timeout,
        ranks=ranks,
        on_gpus=device != "cpu",
        reports=reports,
    )
    if between_nodes:
        if slurm is None and number is None:
            raise UsageError(
                "--between-nodes needs two nodes", next_step="Add --slurm; or tune first, then: autotune network."
            )
        job = replace(job, then=lambda first: _second(job, first, models=len(model), minutes=minutes, data=data))
    if submitted(context, job, slurm, wait=wait, dry_run=dry_run, as_json=as_json):
        return
    if not here:
        refuse_login_node(["autotune", *arguments_of(context)])
    asked = {
        "--device": device, "--memory": memory, "--seq-length": seq_length, "--precision": precision,
        "--global-batch-tokens": global_batch_tokens, "--ranks": ranks, "--max-rows": max_rows,
    }  # fmt: skip
    common = ["--data", str(data), "--reports", str(reports), "--trial-timeout", f"{trial_timeout:g}", "--here"]
    again = shlex.join(["autotune", *arguments_of(context)])
    stage = _Stages(go_on=again if number is None else f"submit it again, with --slurm as before: {again}")
    models = [word for one in model for word in ("--model", one)]
    probed = stage.run("probe", [*models, *_options(asked), "--out", str(out), *common])["models"]
    profiles = [one["profile"] for one in probed]
    for one in probed:
        timed = ["--profile", one["profile"], "--minutes", f"{minutes:g}", *common]
        if workers:
            stage.run("workers", timed)
        if network and one["local_ranks"] > 1:
            stage.run("network", [*timed, "--ranks", str(one["local_ranks"])])
        if baseline:
            worth = ["--profile", one["profile"], "--minutes", f"{baseline_minutes:g}", *common]
            stage.run("baseline", worth)
    report = str(reports / Path(profiles[0]).stem / _REPORT)
    stage.run("report", ["build", *profiles, "--reports", str(reports), "--out", report])
    found = {"profiles": profiles, "report": report}
    if number is not None:
        kept = found | {"baseline_minutes": baseline_minutes}
        write_atomically(_found_by(number, reports), json.dumps(kept, indent=1) + "\n")
    print(json.dumps(found, indent=2) if as_json else _text(profiles, report))


def tune_between_nodes(
    *,
    tuned: Annotated[Path, typer.Argument(help="What a tuning in a job found.")],
    data: Annotated[Path, typer.Option(help="Dataset directory.")],
    minutes: Annotated[float, typer.Option(help="For the network of each profile.")],
    trial_timeout: Annotated[float, typer.Option(help="Seconds that one trial may take.")],
    reports: Reports,
) -> None:
    """Measure the network of this job's nodes for each profile of a tuning, and write its report anew."""
    from trainer.schema import read_json

    found = read_json(tuned)
    stage = _Stages(go_on=f"submit this job's script again, which lies in {reports / 'jobs'}")
    common = ["--data", str(data), "--trial-timeout", f"{trial_timeout:g}", "--reports", str(reports), "--here"]
    for profile in found["profiles"]:
        stage.run("network", ["--profile", profile, "--minutes", f"{minutes:g}", *common])
        if found["baseline_minutes"]:  # another exchange, and what the old settings were worth is no longer said
            stage.run("baseline", ["--profile", profile, "--minutes", f"{found['baseline_minutes']:g}", *common])
    stage.run("report", ["build", *found["profiles"], "--reports", str(reports), "--out", found["report"]])
    print(_text(found["profiles"], found["report"]))


def _second(first: JobRequest, number: str, *, models: int, minutes: float, data: Path) -> JobRequest:
    """The job that measures between nodes, after the one that tunes."""
    command = [
        "tune-between-nodes", str(_found_by(number, first.reports)), "--data", str(data), "--minutes", f"{minutes:g}",
        "--trial-timeout", f"{first.trial_timeout_s:g}", "--reports", str(first.reports),
    ]  # fmt: skip
    return replace(
        first,
        name="tune-between-nodes",
        purpose=f"Measures the network between two nodes for what job {number} tuned.",
        expected_minutes=1 + (minutes + _BASELINE_MINUTES) * models,
        nodes=2,
        with_srun=False,
        command=command,
        then=None,
    )


def _found_by(number: str, reports: Path) -> Path:
    return reports / "jobs" / f"tune-{number}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stages:
    """Runs this program's other commands, each in a process of its own."""

    go_on: str
    """What to do when one of them fails."""

    def run(self, name: str, arguments: list[str]) -> dict[str, Any]:
        """One command; its progress and its words about what is wrong are shown as they come.

        Returns:
            What it said as JSON.

        Raises:
            SystemExit: If it failed, with its code.
        """
        sys.stderr.write(f"tune: {name}\n")
        process = subprocess.Popen(
            [sys.executable, "-m", "autotune", name, *arguments, "--json"], stdout=subprocess.PIPE, text=True
        )
        try:
            said, _ = process.communicate()
        except KeyboardInterrupt:
            process.wait()  # it has heard the same, and saves
            raise SystemExit(EXIT_INTERRUPTED) from None
        if process.returncode:
            sys.stderr.write(f"tune: {name} ended with code {process.returncode}; to go on from here: {self.go_on}\n")
            raise SystemExit(process.returncode)
        try:
            found: dict[str, Any] = json.loads(said)
        except ValueError as error:
            raise InternalError(
                f"{name} did not answer in JSON: {said[:200]}", next_step="Please report this."
            ) from error
        return found


def _options(asked: Mapping[str, object]) -> list[str]:
    return [word for option, value in asked.items() if value is not None for word in (option, str(value))]


def _text(profiles: list[str], report: str) -> str:
    first = profiles[0]
    return "\n".join(
        [
            *(f"profile: {profile}" for profile in profiles),
            f"report: {report}",
            f"next: review the report; then autotune launch local --profile {first}",
            f"before many nodes: autotune network --profile {first} --slurm, then autotune launch slurm",
        ]
    )
