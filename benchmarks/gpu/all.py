"""``python -m benchmarks.gpu.all --out DIR``: what a machine with a GPU reaches, in nine minutes.

For the owner of a GPU machine. From a checkout of the project, on an otherwise idle GPU:

    make gpu-check

which makes a virtual environment with the tested versions and writes ``reports/gpu/latest``. In an environment that
has the project's dependencies already (a container, a module, a job of a cluster):

    python -m benchmarks.gpu.all --out DIR --minutes 9
    srun --gres=gpu:1 --cpus-per-task=8 python -m benchmarks.gpu.all --out DIR

It needs no network, no dataset and no privileges, and changes no setting of the GPU. Of several GPUs it takes the
first; choose another one with ``CUDA_VISIBLE_DEVICES``. The stages, the most valuable first, each in its own time box:

    machine   the GPU, the driver, the host, the versions of the libraries, and what is missing
    ceilings  the rate of large bf16 matrix products, and the bandwidth of copies within the GPU's memory
    nvml      what NVML and GPM read on the idle GPU, under full load and under half a load, beside the load itself
    probe     the largest micro-batch of bert-120m that fits, predicted bytes beside measured ones; on a card of more
              than 94 GB a second time with the memory of an H100 NVL
    same      whether varlen attention computes what rows under a mask compute, and steps never wait for the GPU
    train     optimizer steps of bert-120m at a moderate micro-batch: tokens/s, step time, memory, counters

``DIR/gpu-check.json`` is whole after every stage, so a check that is cut off keeps what it had; ``DIR/ledger.jsonl``
holds every trial. An earlier check's files there are replaced. The units are in the names, and every figure says
whether it was measured, predicted, or not measured and why.

Without a GPU, ``--device cpu --tiny`` runs the same stages in small, to try the check itself.

Exit codes: 0 when all stages measured, 1 when one failed or had no time, 2 when nothing could be measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import autotune
from autotune.errors import EXIT_INTERRUPTED, AutotuneError, MachineLacks
from autotune.measure.clock import Clock, SystemClock
from autotune.measure.host import SystemHost
from autotune.measure.nvml import NvmlMonitor
from autotune.search.site import Site, open_site
from autotune.store import check_writable, write_atomically
from benchmarks.corpora import synthetic_manifest
from benchmarks.gpu import load, machine, probe, same, steps
from benchmarks.gpu.results import NOT_REACHED, CheckReport, StageResult, report_table
from benchmarks.gpu.rig import Rig, open_rig, say
from benchmarks.gpu.sizes import sizes_for
from benchmarks.gpu.stages import Stage, box_s, run_stage
from trainer.dataset import read_manifest
from trainer.errors import TrainerError

REPORT_NAME = "gpu-check.json"
EXIT_UNMEASURED = 2
CLOSING_SHARE, CLOSING_MOST_S = 0.05, 20.0
"""Kept back from the time, to end what hangs and to write the report."""

STAGES = (
    Stage(name="machine", measure=machine.measure, weight=3, least_s=2.0),
    Stage(name="ceilings", measure=load.measure_ceilings, weight=2, least_s=5.0),
    Stage(name="nvml", measure=load.measure_nvml, weight=2.5, least_s=8.0),
    Stage(name="probe", measure=probe.measure, weight=8, least_s=8.0),
    Stage(name="same", measure=same.measure, weight=1.5, least_s=20.0),
    Stage(name="train", measure=steps.measure, weight=1.5, least_s=5.0),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit code."""
    options = _parse(arguments)
    monitor, clock = NvmlMonitor(), SystemClock()
    try:
        check_writable(options.out)
        site = _site(options, monitor)
        # A machine without a GPU tries the check itself; in full that would take hours.
        tiny = options.tiny or (options.device == "auto" and site.device == "cpu")
        sizes = sizes_for(site.device, tiny=tiny)
        manifest = read_manifest(options.data) if options.data else synthetic_manifest(sizes.vocab_size)
        with open_rig(site=site, monitor=monitor, manifest=manifest, sizes=sizes, clock=clock, out=options.out) as rig:
            report = run_check(rig, STAGES, options.minutes * 60, options.out)
    except (AutotuneError, TrainerError) as error:
        sys.stderr.write(f"error: {error.message}\n  next: {error.next_step}\n")
        return EXIT_UNMEASURED
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted: the stages that ended are in {options.out / REPORT_NAME}\n")
        return EXIT_INTERRUPTED
    finally:
        monitor.close()
    print(report_table(report))
    print(f"written: {options.out / REPORT_NAME}")
    return report.exit_code


def run_check(rig: Rig, stages: tuple[Stage, ...], limit_s: float, out: Path) -> CheckReport:
    """Run all stages within the time, and write the report before the first and after each."""
    clock: Clock = rig.clock
    end_s = clock.monotonic_s() + limit_s - min(CLOSING_MOST_S, CLOSING_SHARE * limit_s)
    report = CheckReport(
        tool_version=autotune.__version__,
        started_utc=clock.utc_now().isoformat(),
        device=rig.site.name,
        sizes=rig.sizes.name,
        limit_s=limit_s,
        finished=False,
        stages=tuple(StageResult(name=stage.name, status="not measured", reason=NOT_REACHED) for stage in stages),
    )
    _write(report, out)
    for number, stage in enumerate(stages):
        seconds = box_s(stages, number, max(0.0, end_s - clock.monotonic_s()))
        say(f"{stage.name}: at most {seconds:.0f} s")
        result = run_stage(stage, rig, seconds)
        say(f"{stage.name}: {result.status} after {result.seconds:.1f} s{_because(result)}")
        done = (*report.stages[:number], result, *report.stages[number + 1 :])
        report = replace(report, stages=done, finished=number + 1 == len(stages))
        _write(report, out)
    return report


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = "Measure what a machine with a GPU reaches. How to run it: the head of benchmarks/gpu/all.py."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.all", description=description)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.add_argument("--minutes", type=float, default=9.0, help="the longest that all of it may take")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the check itself")
    parser.add_argument("--data", type=Path, metavar="DIR", help="take vocabulary and special tokens of this dataset")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes <= 24 * 60:
        parser.error(f"--minutes {options.minutes:g} is not between 0 and 1440")
    return options


def _site(options: argparse.Namespace, monitor: NvmlMonitor) -> Site:
    site = open_site(options.device, options.out, SystemHost(), monitor)
    for library in ("torch", "transformers"):
        if library not in site.versions:
            raise MachineLacks(f"{library} is not installed", next_step=f"Install it: pip install {library}")
    # The report is passed on; where it lay is nobody's business.
    disks = tuple(replace(disk, path="--out") for disk in site.host.disks)
    return replace(site, host=replace(site.host, disks=disks))


def _because(result: StageResult) -> str:
    return f" ({result.reason.splitlines()[0]})" if result.reason else ""


def _write(report: CheckReport, out: Path) -> None:
    write_atomically(out / REPORT_NAME, json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
