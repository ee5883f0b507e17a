"""``autotune scale``: how many nodes are useful at the user's global batch, predicted, and measured where they are."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.commands.completion import profiles
from autotune.commands.jobs import DryRun, JobRequest, Slurm, Wait, submitted
from autotune.commands.options import REPORTS, AsJson, ProfileData, Reports, TrialTimeout, parsed
from autotune.core.defaults import TRIAL_TIMEOUT_S
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.core.evidence import Scaling, ScalingRow
    from autotune.search.profiles import StoredProfile
    from autotune.search.scaling import Known, MeasuredStep

DEFAULT_NODES = "1,2,4,8,16,32,64,128"
_STEPS = 8
_MINUTES_PER_COUNT = 1.5


def scale(
    context: typer.Context,
    *,
    profile: Annotated[
        list[Path], typer.Option(help="A probed profile; several are shown together.", autocompletion=profiles)
    ],
    nodes: Annotated[
        str | None, typer.Option(help=f"Numbers of nodes, with commas between. Default: {DEFAULT_NODES}.")
    ] = None,
    data: ProfileData = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Assume this line rate of a node's card, such as 25Gbit, instead of measured.")
    ] = None,
    latency: Annotated[str, typer.Option(help="With --bandwidth: of a hop between nodes.")] = "25us",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks on each node. Default: as the profile was measured.")
    ] = None,
    global_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Real tokens of a step over all ranks. Default: the profile's.")
    ] = None,
    sixteen_bit: Annotated[
        bool, typer.Option("--16-bit-gradients", help="As if a check had found the loss with 16-bit gradients equal.")
    ] = False,
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S,
    slurm: Slurm = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Predict tokens/s from one node to many under the same global batch, and measure what this job's nodes can."""
    from autotune.core.units import parse_bits_per_s, parse_seconds
    from autotune.search.profiles import read_profile
    from autotune.search.scaling import Assumed, known_of, predict_scaling
    from autotune.show.answers import answer_json
    from autotune.show.scaling import scaling_text

    if nodes is None and slurm is not None:
        raise UsageError(
            "--slurm asks for as many nodes as the largest number, and none was given",
            next_step="Say on which numbers of nodes to measure: --nodes 1,2,4",
        )
    counts = _counts(nodes or DEFAULT_NODES)
    every = [read_profile(path) for path in profile]
    job = _job(every, counts, ranks, trial_timeout, reports)
    if submitted(context, job, slurm, wait=wait, dry_run=dry_run, as_json=as_json):
        return
    assumed = None
    if bandwidth is not None:
        assumed = Assumed(
            bits_per_s=parsed(parse_bits_per_s, bandwidth, "--bandwidth"),
            latency_s=parsed(parse_seconds, latency, "--latency"),
        )
    measuring = _Measuring(data=data, trial_timeout_s=trial_timeout, reports=reports)
    found = []
    for stored in every:
        known = known_of(
            stored.profile,
            assumed=assumed,
            ranks_per_node=ranks,
            global_batch_tokens=global_batch_tokens,
            sixteen_bit=sixteen_bit,
        )
        predicted = predict_scaling(stored.profile.train.model.name, known, counts, _rows_per_epoch(stored, data))
        _keep_prediction(stored, predicted, reports)
        found.append(measuring.of(stored, known, predicted))
    print(answer_json(found) if as_json else scaling_text(found))


def _job(
    every: Sequence["StoredProfile"], counts: Sequence[int], ranks: int | None, trial_timeout_s: float, reports: Path
) -> JobRequest:
    from autotune.search.scaling import ranks_of

    first = every[0].profile
    return JobRequest(
        name="scale",
        purpose=f"Measures {', '.join(one.profile.train.model.name for one in every)} on up to {max(counts)} nodes.",
        ledger=", ".join(str(reports / one.path.stem / "ledger") for one in every),
        expected_minutes=1 + _MINUTES_PER_COUNT * len(counts) * len(every),
        trial_timeout_s=trial_timeout_s,
        nodes=max(counts),
        ranks=ranks or ranks_of(first),
        on_gpus=first.train.device == "cuda",
        cpus=first.fingerprint.allotted_cpus,
        with_srun=False,
        reports=reports,
    )


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--nodes {text}: not numbers of nodes", next_step="Write them with commas: --nodes 1,2,4")
    return sorted({int(part) for part in parts})


def _rows_per_epoch(stored: "StoredProfile", data: Path | None) -> float | None:
    """Rows of one pass over the dataset; None where it is not here."""
    from trainer.dataset import read_manifest
    from trainer.plan import SPECIAL_TOKENS_PER_SAMPLE

    directory, probe = stored.data_here(data), stored.profile.evidence.probe
    if probe is None or directory is None:
        return None
    manifest = read_manifest(directory)
    tokens = sum(shard.tokens for shard in manifest.train.shards) + SPECIAL_TOKENS_PER_SAMPLE * manifest.train.samples
    return tokens / probe.mean_real_tokens_per_row


def _keep_prediction(stored: "StoredProfile", predicted: "Scaling", reports: Path) -> None:
    """Write the prediction before anything is measured, so that nobody can fit it afterwards."""
    from autotune.search.profiles import report_directory
    from autotune.show.answers import plain
    from autotune.store import write_atomically
    from trainer.events import utc_now

    kept = {"predicted_utc": utc_now(), **plain(predicted)}
    path = report_directory(stored.path, reports) / "scaling-predicted.json"
    write_atomically(path, json.dumps(kept, indent=1) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measuring:
    """How to measure, where there is something to measure on."""

    data: Path | None
    trial_timeout_s: float
    reports: Path

    def of(self, stored: "StoredProfile", known: "Known", predicted: "Scaling") -> "Scaling":
        """What this job's nodes can measure beside what was predicted; unchanged outside of a job of several nodes."""
        from autotune.search.scaling import with_measured
        from autotune.tuning.together import nodes_here

        there = nodes_here()
        if there < 2:
            return predicted
        measured = {}
        for row in predicted.rows:
            if row.nodes <= there:
                measured[row.nodes] = step = self._one(stored, known, row)
                sys.stderr.write(
                    f"{predicted.name}: {row.nodes} nodes: {step.step_s:.4g} s a step, predicted {row.step_s:.4g} s\n"
                )
        return with_measured(predicted, measured)

    def _one(self, stored: "StoredProfile", known: "Known", row: "ScalingRow") -> "MeasuredStep":
        """Steps on so many nodes, with the exchange that was predicted to be best there."""
        from autotune.search.network import NetworkRequest, NetworkTuning
        from autotune.search.profiles import report_directory
        from autotune.search.scaling import measured_step
        from autotune.tuning.bench import trial_runner
        from autotune.tuning.together import open_together
        from trainer.dataset import read_manifest
        from trainer.progress import progress

        train = stored.profile.train
        data_dir = stored.data_dir(self.data)
        manifest, place = read_manifest(data_dir), report_directory(stored.path, self.reports)
        ranks = known.network.ranks_per_node  # as predicted: another number would have another dealing
        with open_together(train.device, data_dir, place, row.nodes, ranks, alone=True) as bench:
            here = bench.fingerprint(train.model, manifest)
            request = NetworkRequest(
                config=train.model_copy(update={"global_batch_rows": known.load.global_batch_rows}),
                data_dir=str(data_dir.resolve()),
                nodes=row.nodes,
                ranks_per_node=bench.ranks_per_node,
                most_rows=known.load.most_rows,
                real_tokens_per_row=known.load.real_tokens_per_row,
                budget_s=self.trial_timeout_s,
                trial_timeout_s=self.trial_timeout_s,
            )
            with progress(f"scale {train.model.name}, {row.nodes} nodes") as update:
                runner = trial_runner(bench.machine, place / "ledger", here, update, expected_trials=1)
                tuning = NetworkTuning(request=request, runner=runner)
                return measured_step(tuning, known, row, _STEPS)
