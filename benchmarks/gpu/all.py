"""``python -m benchmarks.gpu.all --out DIR``: everything that this project claims of a GPU, measured on one.

For the owner of a machine with an H100 or H200. From a checkout of the project, on an otherwise idle GPU:

    make gpu-check

which makes a virtual environment, measures for nine minutes, and keeps the results in ``reports/gpu/GPU/DATE``. In an
environment that has the project's dependencies already (a container, a module, a job of a cluster):

    python -m benchmarks.gpu.all --out DIR --minutes 30
    srun --gres=gpu:1 --cpus-per-task=8 python -m benchmarks.gpu.all --out DIR

On a machine without network, ``python -m benchmarks.gpu.pack`` makes a folder of what is missing there. The check needs
no dataset (``--data`` takes a prepared one) and no privileges, and changes no setting of the GPU. Of several GPUs it
takes the first; choose another one with ``CUDA_VISIBLE_DEVICES``. The stages, the most valuable first, each in its own
time box:

    machine    the GPU, the driver, the host, the versions of the libraries, and what is missing
    ceilings   the rate of large bf16 matrix products, and the bandwidth of copies within the GPU's memory
    nvml       what NVML and GPM read on the idle GPU, under full load and under half a load, beside the load itself
    memory     predicted memory beside the GPU's over 14 configurations, and the largest micro-batch of each, and of the
               paper-style step; on a card with more memory than an H100 NVL, most of them with that card's
    train      tokens/s and MFU of bert-120m and bert-350m, against the paper-style step and transformers' Trainer, and
               with one thing left out at a time
    workers    the sweep of loader workers, for a fast and a slow dataset
    maths      whether varlen attention, packed rows and compiled layers compute what plain ones do
    tune       ``autotune tune`` of both models, end to end, to profiles and a report
    endurance  2,000 steps of a real training at the largest micro-batch, of which no allocation may be tried twice
    saves      what saving the state of training costs
    ranks      with ``--nproc 2``: memory of NCCL, the link between GPUs, one rank out of memory

Nine minutes are enough for the first half. ``--only memory,train`` measures some stages; what an earlier check in the
same directory found of the others is kept, and ``memory``, ``train`` and ``tune`` go on where they were not ended, so a
scarce GPU can be used in several visits. All of it takes about 40 minutes.

``DIR/gpu-check.json`` and ``DIR/gpu-check.html`` are whole after every stage, so a check that is cut off keeps what it
had; ``DIR/ledger.jsonl`` holds every trial, ``DIR/tune.zip`` what ``autotune tune`` wrote. The units are in the names,
and every figure says whether it was measured, predicted, or not measured and why.

Without a GPU, ``--device cpu --tiny`` runs the same stages in small, to try the check itself.

Exit codes: 0 when all stages measured and no bar is short, 1 when one failed, had no time or fell short, 2 when nothing
could be measured.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import autotune
from autotune.errors import EXIT_INTERRUPTED, AutotuneError, BadInput, MachineLacks
from autotune.measure.clock import Clock, SystemClock
from autotune.measure.host import SystemHost
from autotune.measure.nvml import NvmlMonitor
from autotune.search.site import Site, open_site
from autotune.store import check_writable, write_atomically
from benchmarks.gpu.check.bars import bars_of
from benchmarks.gpu.check.results import NOT_ASKED, NOT_REACHED, CheckReport, StageResult, bars_text, report_table
from benchmarks.gpu.check.rig import Rig, open_rig, say
from benchmarks.gpu.check.sizes import sizes_for
from benchmarks.gpu.check.stages import Stage, box_s, run_stage
from benchmarks.gpu.stage import endurance, load, machine, maths, memory, ranks, saves, train, tuning, workers
from tests.simulators.corpora import synthetic_manifest
from trainer.dataset import read_manifest
from trainer.errors import TrainerError

REPORT_NAME, PAGE_NAME = "gpu-check.json", "gpu-check.html"
EXIT_UNMEASURED = 2
CLOSING_SHARE, CLOSING_MOST_S = 0.05, 20.0
"""Kept back from the time, to end what hangs and to write the report."""

STAGES = (
    # The first imports torch, which takes a minute from a cold disk; what it leaves, the others have.
    Stage(name="machine", measure=machine.measure, weight=6, least_s=30.0),
    Stage(name="ceilings", measure=load.measure_ceilings, weight=3, least_s=20.0),
    Stage(name="nvml", measure=load.measure_nvml, weight=6, least_s=45.0),
    Stage(name="memory", measure=memory.measure, weight=30, least_s=120.0),
    Stage(name="train", measure=train.measure, weight=24, least_s=120.0),
    Stage(name="workers", measure=workers.measure, weight=20, least_s=150.0),
    Stage(name="maths", measure=maths.measure, weight=10, least_s=60.0),
    Stage(name="tune", measure=tuning.measure, weight=50, least_s=240.0),
    Stage(name="endurance", measure=endurance.measure, weight=24, least_s=120.0),
    Stage(name="saves", measure=saves.measure, weight=8, least_s=60.0),
    Stage(name="ranks", measure=ranks.measure, weight=12, least_s=60.0, ranks=2),
)
TINY_LEAST_SHARE = 0.05
"""Of the least time of a stage, where sizes are tiny."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit code."""
    options = _parse(arguments)
    monitor, clock = NvmlMonitor(), SystemClock()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cluster's end is a user's: nothing is left behind
    try:
        check_writable(options.out)
        site = _site(options, monitor)
        # A machine without a GPU tries the check itself; in full that would take hours.
        tiny = options.tiny or (options.device == "auto" and site.device == "cpu")
        sizes = sizes_for(site.device, tiny=tiny)
        manifest = read_manifest(options.data) if options.data else synthetic_manifest(sizes.vocab_size)
        with open_rig(
            site=site,
            monitor=monitor,
            manifest=manifest,
            sizes=sizes,
            clock=clock,
            out=options.out,
            data=options.data,
            nproc=options.nproc,
        ) as rig:
            report = run_check(rig, STAGES, options.minutes * 60, options.out, only=options.only)
    except (AutotuneError, TrainerError) as error:
        sys.stderr.write(f"error: {error.message}\n  next: {error.next_step}\n")
        return EXIT_UNMEASURED
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted: the stages that ended are in {options.out / REPORT_NAME}\n")
        return EXIT_INTERRUPTED
    finally:
        monitor.close()
    print(report_table(report) + bars_text(report.bars))
    print(f"written: {options.out / PAGE_NAME}, {options.out / REPORT_NAME}")
    return report.exit_code


def run_check(
    rig: Rig, stages: tuple[Stage, ...], limit_s: float, out: Path, *, only: Sequence[str] = ()
) -> CheckReport:
    """Run all stages within the time, or some, and write the report before the first and after each.

    Args:
        rig: The machine.
        stages: All there are.
        limit_s: For all of them.
        out: Where an earlier report of the same device may lie.
        only: Names of those to run; empty for all that so many ranks can run.
    """
    clock: Clock = rig.clock
    end_s = clock.monotonic_s() + limit_s - min(CLOSING_MOST_S, CLOSING_SHARE * limit_s)
    asked = tuple(stage for stage in stages if stage.ranks <= rig.nproc and (not only or stage.name in only))
    earlier = _earlier(rig, out)
    rig.unfinished = {one.name: one for one in earlier if one.status in ("not measured", "failed") and one.measured_utc}
    if earlier:
        rig.keep_trials()
    least_share = TINY_LEAST_SHARE if rig.sizes.name == "tiny" else 1.0
    report = CheckReport(
        tool_version=autotune.__version__,
        started_utc=clock.utc_now().isoformat(),
        device=rig.site.name,
        sizes=rig.sizes.name,
        limit_s=limit_s,
        finished=False,
        stages=tuple(_before(stage, asked, rig, earlier) for stage in stages),
    )
    _write(report, out)
    for number, stage in enumerate(asked):
        seconds = box_s(asked, number, max(0.0, end_s - clock.monotonic_s()), least_share=least_share)
        say(f"{stage.name}: at most {seconds:.0f} s")
        result = run_stage(stage, rig, seconds, least_share=least_share)
        if result.measured_utc is None:  # not begun: what was there stays
            result = rig.unfinished.get(stage.name, result)
        say(f"{stage.name}: {result.status} after {result.seconds:.1f} s{_because(result)}")
        done = tuple(result if one.name == stage.name else one for one in report.stages)
        report = replace(report, stages=done, finished=number + 1 == len(asked))
        report = _write(report, out)
    return report


def _before(stage: Stage, asked: Sequence[Stage], rig: Rig, earlier: Sequence[StageResult]) -> StageResult:
    """How a stage stands before the first runs: one that is not asked for as an earlier check here left it."""
    if stage in asked:
        not_reached = StageResult(name=stage.name, status="not measured", reason=NOT_REACHED)
        return rig.unfinished.get(stage.name, not_reached)
    reason = NOT_ASKED if stage.ranks <= rig.nproc else f"it needs {stage.ranks} ranks: --nproc {stage.ranks}"
    left_out = StageResult(name=stage.name, status="not asked for", reason=reason)
    return next((one for one in earlier if one.name == stage.name and one.measured_utc), left_out)


def _earlier(rig: Rig, out: Path) -> tuple[StageResult, ...]:
    """What a check of the same device, sizes and version found in this directory."""
    try:
        found = CheckReport.of(json.loads((out / REPORT_NAME).read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return ()
    here = (rig.site.name, rig.sizes.name, autotune.__version__)
    return found.stages if (found.device, found.sizes, found.tool_version) == here else ()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = "Measure what a machine with a GPU reaches. How to run it: the head of benchmarks/gpu/all.py."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.all", description=description)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.add_argument("--minutes", type=float, default=9.0, help="the longest that all of it may take")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the check itself")
    parser.add_argument("--data", type=Path, metavar="DIR", help="train on this prepared dataset")
    parser.add_argument("--only", default="", metavar="STAGE,…", help="some stages; what is there of others is kept")
    parser.add_argument("--nproc", type=int, default=1, help="ranks, each with a GPU of its own, for the stage ranks")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes <= 24 * 60:
        parser.error(f"--minutes {options.minutes:g} is not between 0 and 1440")
    if not 1 <= options.nproc <= 16:
        parser.error(f"--nproc {options.nproc} is not between 1 and 16")
    names = [stage.name for stage in STAGES if stage.ranks <= options.nproc]
    options.only = [name for name in options.only.split(",") if name]
    if unknown := sorted(set(options.only) - set(names)):
        parser.error(f"no such stage for --nproc {options.nproc}: {', '.join(unknown)}; there are {', '.join(names)}")
    return options


def _site(options: argparse.Namespace, monitor: NvmlMonitor) -> Site:
    site = open_site(options.device, options.out, SystemHost(), monitor)
    if site.device == "cuda" and len(site.gpus) < options.nproc:
        raise BadInput(
            f"--nproc {options.nproc}, and there {'is 1 GPU' if len(site.gpus) == 1 else f'are {len(site.gpus)} GPUs'}",
            next_step="Ask for as many ranks as there are GPUs.",
        )
    for library in ("torch", "transformers"):
        if library not in site.versions:
            raise MachineLacks(f"{library} is not installed", next_step=f"Install it: pip install {library}")
    # The report is passed on; where it lay is nobody's business.
    disks = tuple(replace(disk, path="--out") for disk in site.host.disks)
    return replace(site, host=replace(site.host, disks=disks))


def _because(result: StageResult) -> str:
    return f" ({result.reason.splitlines()[0]})" if result.reason else ""


def _write(report: CheckReport, out: Path) -> CheckReport:
    """Write both forms, the bars held against what there is by now; returns it with them."""
    from benchmarks.gpu.check.page import check_page

    report = report if report.sizes == "tiny" else replace(report, bars=bars_of(report))
    written = json.dumps(report.to_json(), indent=1, allow_nan=False, default=str)
    write_atomically(out / REPORT_NAME, written + "\n")
    try:
        page = check_page(CheckReport.of(json.loads(written)))
    except Exception as error:  # noqa: BLE001 - the page can be written another time, the figures cannot
        say(f"the page could not be written ({type(error).__name__}: {error}); the figures are in {REPORT_NAME}")
    else:
        write_atomically(out / PAGE_NAME, page)
    return report


if __name__ == "__main__":
    sys.exit(main())
