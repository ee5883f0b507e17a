"""``python -m benchmarks.gpu.memory --json FILE``: predicted memory against a GPU's, over many configurations.

For each configuration: trace, predict the largest micro-batch, then find the true one by trials under the allocator's
own limit. Kept are the error of the peak that the trace alone predicted, the error after the trials that came before,
and the predicted largest beside the true one. Where the card has more than an H100 NVL, half of the configurations run
with that card's memory. Then the true largest of the first configuration trains on, with evaluations in between, for as
long as there is time, and no allocation may be tried twice.

Needs one GPU, no network and no dataset. The file is whole after every configuration; what there was no time for is
listed as not measured. ``--tiny`` runs two small configurations on a CPU, to try the benchmark itself.

Bars: median error of the peak 3 % before any trial and 1 % after, worst 6 %; no predicted largest more than 3 % above
the true one; 2,000 further steps without a second try.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from autotune.core.cards import find_card
from autotune.core.outcome import Measured, describe
from autotune.decide.search import bracket, predict_bytes
from autotune.decide.surroundings import expected_on_cpu, expected_on_gpu
from autotune.errors import AutotuneError
from autotune.measure.clock import Clock, SystemClock
from autotune.measure.host import SystemHost
from autotune.measure.machine import ForkServerMachine
from autotune.measure.nvml import NvmlMonitor
from autotune.search.probe import ProbeRequest, Search, step_trial
from autotune.search.site import Site, memory_budget, open_site
from autotune.search.trials import TrialRunner
from autotune.show.tables import text_table
from autotune.store import Ledger, write_atomically
from benchmarks.bars import EXIT_UNMEASURED, Bar, exit_code, lines
from benchmarks.corpora import synthetic_manifest
from benchmarks.gpu.rig import BoxedMachine, NoTimeLeft, TimeBox, say
from trainer.config import Checkpointing, ModelSettings, Precision
from trainer.errors import TrainerError
from trainer.presets import model_settings

VOCAB_SIZE = 30_522
IMITATED = "h100-nvl-94gb"
DOCUMENTS_PER_ROW = 4.0
MEDIAN_BEFORE_BAR, MEDIAN_AFTER_BAR, WORST_BAR, ABOVE_BAR = 0.03, 0.01, 0.06, 0.03
HELD_STEPS_BAR = 2_000
TRIAL_TIMEOUT_S = 240.0
HOLD_SHARE = 0.3
"""Of the time, for training on at the largest micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One configuration."""

    model: str
    precision: Precision = "bf16"
    dropout: float | None = 0.0
    """Of attention weights: 0 lets GPUs take varlen kernels, None is the model's own."""
    checkpointing: Checkpointing = "none"
    card: Literal["whole", "imitated"] = "whole"
    seq_length_tokens: int = 512

    @property
    def name(self) -> str:
        """In a few words."""
        attention = "varlen" if self.dropout == 0.0 and self.precision == "bf16" else "sdpa"
        return f"{self.model} {self.precision} {attention} {self.checkpointing} {self.card} {self.seq_length_tokens}"


SETTINGS = (
    Setting(model="bert-120m", card="imitated"),
    Setting(model="bert-350m", card="imitated"),
    Setting(model="bert-120m", dropout=None),
    Setting(model="bert-120m", precision="fp32", card="imitated"),
    Setting(model="modernbert-base", card="imitated"),
    Setting(model="bert-350m", checkpointing="full"),
    Setting(model="bert-350m", precision="fp32", dropout=None, card="imitated"),
    Setting(model="bert-120m", checkpointing="selective", card="imitated"),
    Setting(model="modernbert-large"),
    Setting(model="modernbert-base", checkpointing="full", seq_length_tokens=1024),
    Setting(model="bert-350m"),
    Setting(model="bert-120m", dropout=None, card="imitated", seq_length_tokens=128),
    Setting(model="modernbert-base", precision="fp32", card="imitated"),
)
TINY = (
    Setting(model="bert-mini", precision="fp32", dropout=None, seq_length_tokens=64),
    Setting(model="bert-mini", precision="fp32", checkpointing="full", seq_length_tokens=64),
)
TINY_BUDGET_BYTES, TINY_VOCAB_SIZE = 192 * 2**20, 4096


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.memory", description="Predicted against a GPU's.")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--minutes", type=float, default=9.5, help="all of it takes no longer")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU, to try the benchmark itself")
    options = parser.parse_args(arguments)
    monitor, clock = NvmlMonitor(), SystemClock()
    box = TimeBox(clock=clock, end_s=clock.monotonic_s() + 60 * options.minutes)
    try:
        site = open_site("cpu" if options.tiny else "cuda", Path.cwd(), SystemHost(), monitor)
        found = measure(site, TINY if options.tiny else SETTINGS, box, clock, options.json)
    except (AutotuneError, TrainerError) as error:
        sys.stderr.write(f"error: {error.message}\n  next: {error.next_step}\n")
        return EXIT_UNMEASURED
    finally:
        monitor.close()
    bars = make_bars(found)
    found["bars"] = [bar.to_json() for bar in bars]
    _write(options.json, found)
    print(_table(found["settings"]))
    print(lines(bars))
    return exit_code(bars)


def measure(site: Site, settings: Sequence[Setting], box: TimeBox, clock: Clock, file: Path | None) -> dict[str, Any]:
    """All configurations that there is time for, then the long run."""
    found: dict[str, Any] = {
        "device": site.name,
        "versions": dict(site.versions),
        "driver": site.gpu.driver if site.gpu else None,
        "settings": {one.name: {"not measured": "no time left"} for one in settings},
    }
    with tempfile.TemporaryDirectory(prefix="gpu-memory-") as place, ForkServerMachine() as machine:
        machine.start()
        ledger = Ledger(Path(place), "memory")
        searches: dict[str, Search] = {}
        part = box.part(1 - HOLD_SHARE)
        for one in settings:
            runner = _runner(machine, ledger, clock, part)
            search = searches[one.name] = Search(request=_request(site, one), runner=runner)
            try:
                search.predict()
                search.find()
                found["settings"][one.name] = _account(search)
            except NoTimeLeft:
                break
            except (AutotuneError, TrainerError) as error:  # one configuration must not cost the others
                found["settings"][one.name] = {"not measured": error.message}
            say(f"{one.name}: {found['settings'][one.name]}")
            _write(file, found)
        first = searches[settings[0].name]
        found["held"] = _hold(first, _runner(machine, ledger, clock, box))
    return found


def _runner(machine: ForkServerMachine, ledger: Ledger, clock: Clock, box: TimeBox) -> TrialRunner:
    return TrialRunner(machine=BoxedMachine(machine=machine, box=box), ledger=ledger, site="gpu", clock=clock)


def _request(site: Site, one: Setting) -> ProbeRequest:
    on_gpu = site.gpu is not None
    imitated = find_card(IMITATED)
    smaller = site.gpu is not None and site.gpu.total_bytes > imitated.total_bytes
    as_card = imitated if one.card == "imitated" and smaller else None
    settings: ModelSettings = model_settings(one.model)
    return ProbeRequest(
        settings=settings,
        manifest=synthetic_manifest(VOCAB_SIZE if on_gpu else TINY_VOCAB_SIZE),
        seq_length_tokens=one.seq_length_tokens,
        layout="packed",
        attention_dropout=one.dropout,
        precision=one.precision,
        checkpointing=one.checkpointing,
        device=site.device,
        memory_budget_bytes=memory_budget(site, None, as_card) if on_gpu else TINY_BUDGET_BYTES,
        headroom_share=0.0,
        max_rows=16_384,
        trial_timeout_s=TRIAL_TIMEOUT_S,
        device_used_before_bytes=site.device_used_bytes,
        micro_batches=2,
        documents_per_row=DOCUMENTS_PER_ROW,
        expected=expected_on_gpu(site.gpu.compute_capability, 1) if site.gpu else expected_on_cpu(),
    )


def _account(search: Search) -> dict[str, Any]:
    """Predicted beside measured."""
    largest = bracket(search.tried).feasible_max
    if not largest:
        return {"not measured": "not even one row fits"}
    peaks = [one.peak_bytes for one in search.tried if one.rows == largest and one.peak_bytes is not None]
    before = search.traced_bytes(largest) if search.traced_bytes else None
    after = predict_bytes(search.tried, largest, search.prediction)
    return {
        "budget_bytes": search.request.memory_budget_bytes,
        "largest_rows": largest,
        "predicted_rows": search.predicted_rows(),
        "peak_bytes": peaks[0],
        "traced_peak_bytes": before,
        "corrected_peak_bytes": after,
        "trials": [[one.rows, one.fits, one.peak_bytes] for one in search.tried],
        "outside_allocator_bytes": _outside(search),
    }


def _outside(search: Search) -> int | None:
    for done in search.runner.finished:
        if isinstance(done.outcome, Measured):
            outside: int | None = done.outcome.figures["outside_allocator_bytes"]
            return outside
    return None


def _hold(search: Search, runner: TrialRunner) -> dict[str, Any]:
    """Train on at the largest micro-batch; the job itself refuses an allocation that had to be tried again."""
    largest = bracket(search.tried).feasible_max
    if not largest:
        return {"not measured": "there is no largest micro-batch"}
    request = search.request
    fits = [done for done in search.runner.finished if isinstance(done.outcome, Measured)]
    step_s = statistics.median(fits[-1].outcome.figures["step_s"]) if isinstance(fits[-1].outcome, Measured) else 1.0
    machine = runner.machine
    assert isinstance(machine, BoxedMachine)
    steps = int(min(HELD_STEPS_BAR, 0.8 * machine.box.left_s / step_s))
    if steps < 1:
        return {"not measured": "no time left"}
    trial = step_trial(request, largest, (0, steps), request.memory_budget_bytes)
    try:
        outcome = machine.run(replace(trial, timeout_s=machine.box.left_s))
    except NoTimeLeft as error:
        return {"not measured": str(error)}
    if isinstance(outcome, Measured):
        return {"steps": steps, "rows": largest, "peak_bytes": outcome.figures["peak_bytes"]}
    return {"steps": 0, "rows": largest, "outcome": describe(outcome), "detail": outcome.detail}


def make_bars(found: Mapping[str, Any]) -> list[Bar]:
    """Errors of peaks and of the largest micro-batch; what was not measured leaves its bar unmeasured."""
    measured = [one for one in found["settings"].values() if "peak_bytes" in one and one["traced_peak_bytes"]]
    before = [abs(one["traced_peak_bytes"] / one["peak_bytes"] - 1) for one in measured]
    after = [
        abs(one["corrected_peak_bytes"] / one["peak_bytes"] - 1) for one in measured if one["corrected_peak_bytes"]
    ]
    above = [one["predicted_rows"] / one["largest_rows"] - 1 for one in measured]
    held = found.get("held", {}).get("steps")

    def bar(name: str, figure: float | None, limit: float) -> Bar:
        return Bar(name=f"gpu_memory_{name}_share", figure=figure, unit="share", bar=limit, direction="<=")

    return [
        bar("median_error_before_trials", statistics.median(before) if before else None, MEDIAN_BEFORE_BAR),
        bar("median_error_after_trials", statistics.median(after) if after else None, MEDIAN_AFTER_BAR),
        bar("worst_error_before_trials", max(before, default=None), WORST_BAR),
        bar("predicted_rows_above_true", max(above, default=None), ABOVE_BAR),
        Bar(name="gpu_memory_held_steps_count", figure=held, unit="count", bar=HELD_STEPS_BAR, direction=">="),
    ]


def _table(settings: Mapping[str, Any]) -> str:
    rows: list[list[str | None]] = []
    for name, one in settings.items():
        if "peak_bytes" not in one:
            rows.append([name, None, None, None, None, None])
            continue
        errors = [
            None if one[key] is None else f"{one[key] / one['peak_bytes'] - 1:+.2%}"
            for key in ("traced_peak_bytes", "corrected_peak_bytes")
        ]
        rows.append([name, str(one["predicted_rows"]), str(one["largest_rows"]), *errors, str(len(one["trials"]))])
    headers = ("configuration", "predicted rows", "true rows", "peak, traced", "peak, corrected", "trials")
    return text_table(headers, rows, align="lrrrrr")


def _write(file: Path | None, found: Mapping[str, Any]) -> None:
    if file is not None:
        write_atomically(file, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
