"""``python -m benchmarks.gpu --out DIR --next 9min``: run what is next in the queue.

The queue has autotune's own commands and programs of this repository as stages, the
most valuable first. A call runs those that are next and fit into its time; each answer
is written to ``DIR/GPU/check.json`` as soon as its stage ends. Run the same command
again to continue, on this machine or on another one that has DIR. Stages whose results
are kept under ``reports/gpu`` are done, too, for that kind of GPU, as long as their
command, the code they depend on, the dataset and the libraries are the same.

``--list`` shows the queue without a GPU. ``--keep`` copies answers and profiles into
``reports/gpu/GPU/DATE``, with predictions beside measured values, and writes
``docs/reference/gpu.md``. Nothing is kept of a pretended GPU, of one whose peak is not
known, or if a rate exceeds what the GPU can do.

Exit codes: 0 if no chosen stage is waiting and no bar is short, 1 if one waits, failed
or is short, 2 if nothing could be measured or nothing may be kept, 130 after Ctrl-C.
"""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.base.files import check_writable, write_atomically
from autotune.base.readable_json import readable_json
from autotune.base.units import parse_seconds
from autotune.errors import (
    EXIT_INTERRUPTED,
    AutotuneError,
    MachineLacks,
    UsageError,
)
from autotune.machine.host import SystemHost
from autotune.machine.measured_device import MeasuredDevice, open_device
from autotune.machine.torch_gpus import gpus_of_torch
from benchmarks.bars import EXIT_HELD, EXIT_SHORT, EXIT_UNMEASURED, lines
from benchmarks.gpu.claims import CLAIMS
from benchmarks.gpu.dataset import DATA, link_data, make_data
from benchmarks.gpu.figures import figures_of
from benchmarks.gpu.keeping import keep, ship_capped_profiles
from benchmarks.gpu.page import newest_figures, results, write_page
from benchmarks.gpu.plausibility import reasons_against
from benchmarks.gpu.queue import (
    GpuMachine,
    Queue,
    left_out_text,
    list_text,
    plan,
    plan_text,
    reason_against,
    select,
)
from benchmarks.gpu.results import CHECK_NAME, KEPT, ROOT, known_results
from benchmarks.gpu.running import Call, files_to_bring, libraries_of, open_check
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.stages import FULL, TINY, Sizes, stages_of
from trainer.formats.errors import TrainerError
from trainer.formats.nvml import NvmlMonitor

USUAL_GPUS_BYTES = {"h100-80gb-hbm3": 80 * 10**9, "h200": 141 * 10**9}
"""GPUs that ``--list`` shows beside those that have results, with their memory."""
SHIPPED_PROFILES = ROOT / "profiles"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages for which the time suffices, and print the results.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    sizes = TINY if options.tiny else FULL
    # Ends what was started, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = options.out.absolute()
    try:
        stages = stages_of(sizes)
        chosen = select(stages, options.only)
        if options.list:
            print(_listed(out, stages, chosen))
            return EXIT_HELD
        return _measure(options, out, sizes, stages, chosen)
    except (AutotuneError, TrainerError) as error:
        sys.stderr.write(f"error: {error.message}\n  next: {error.next_step}\n")
        return EXIT_UNMEASURED
    except KeyboardInterrupt:
        sys.stderr.write(
            f"interrupted: the stages that ended are in {out}/*/{CHECK_NAME}\n"
        )
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Measure what a GPU reaches."
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory for answers and logs, which later calls continue",
    )
    parser.add_argument(
        "--next",
        type=_duration,
        default=600.0,
        metavar="DURATION",
        help="run the next stages that fit into this time (default: 10min)",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="show the queue with the status of each stage; needs no GPU",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="train on this prepared dataset"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME,…",
        help="run only stages with these names or prefixes",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="test the check itself; keep nothing"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the results and write docs/reference/gpu.md",
    )
    return parser


def _duration(text: str) -> float:
    """Read a duration for argparse, which shows the message of this type of error."""
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _listed(out: Path, stages: Sequence[Stage], chosen: Sequence[Stage]) -> str:
    """Return the queue with the status of each stage on each kind of GPU."""
    measured = {path.parent.parent.name for path in KEPT.glob(f"*/*/{CHECK_NAME}")}
    measured |= {path.parent.name for path in out.glob(f"*/{CHECK_NAME}")}
    queues = {
        gpu: Queue(
            stages=stages, chosen=chosen, known=known_results(out, gpu), libraries={}
        )
        for gpu in sorted(measured | set(USUAL_GPUS_BYTES))
    }
    return list_text(queues, USUAL_GPUS_BYTES)


def _measure(
    options: argparse.Namespace,
    out: Path,
    sizes: Sizes,
    stages: Sequence[Stage],
    chosen: Sequence[Stage],
) -> int:
    """Run what is next, print and keep the results, and return the exit code."""
    end_s = time.monotonic() + options.next
    check_writable(out)
    with contextlib.closing(NvmlMonitor()) as monitor:
        site = open_device("cuda", out, SystemHost(), monitor)
    require_gpu_of_torch()
    machine = machine_of(site)
    require_runnable(chosen, machine)
    make_data(out, options.data, sizes)
    folder = out / site.name
    folder.mkdir(exist_ok=True)
    link_data(out, folder)
    check = open_check(folder, site, tiny=options.tiny)
    libraries = libraries_of(site, out / DATA)
    queue = Queue(
        stages=stages,
        chosen=chosen,
        known=known_results(out, site.name),
        libraries=libraries,
    )
    print(_plan(queue, machine, folder, end_s - time.monotonic()), flush=True)
    call = Call(
        check=check,
        folder=folder,
        end_s=end_s,
        libraries=libraries,
        began_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    left_out = call.run(queue, machine)
    check["figures"] = figures_of(folder, check)
    write_atomically(folder / CHECK_NAME, readable_json(check))
    bars = [claim.bar(newest_figures([check])) for claim in CLAIMS]
    print(left_out_text(left_out), results([check]), lines(bars), sep="\n")
    if options.keep and not _keep(folder, check, sizes):
        return EXIT_UNMEASURED
    return _exit_code(out, queue, machine, check)


def _plan(queue: Queue, machine: GpuMachine, folder: Path, seconds: float) -> str:
    """Return what will run in the remaining seconds, and what will not."""
    brought = {
        str(target.relative_to(folder))
        for _, target in files_to_bring(queue.stages, queue.known, machine.name, folder)
    }
    planned, left_out = plan(
        queue,
        machine,
        seconds,
        lambda path: path in brought or (folder / path).exists(),
    )
    return plan_text(planned, left_out)


def _keep(folder: Path, check: Mapping[str, Any], sizes: Sizes) -> bool:
    """Keep the check, and return whether it may be kept."""
    reasons = reasons_against(folder, check)
    for reason in reasons:
        sys.stderr.write(f"error: nothing is kept: {reason}\n")
    if reasons:
        return False
    print(f"kept: {keep(folder, check, KEPT)}")
    ship_capped_profiles(folder, sizes.capped_gpu, SHIPPED_PROFILES)
    write_page()
    return True


def _exit_code(
    out: Path, queue: Queue, machine: GpuMachine, check: Mapping[str, Any]
) -> int:
    """Return the exit code of a call whose stages have run."""
    now = Queue(
        stages=queue.stages,
        chosen=queue.chosen,
        known=known_results(out, machine.name),
        libraries=queue.libraries,
    )
    waiting = [
        stage
        for stage in now.waiting()
        if not stage.every_call and reason_against(stage, machine) is None
    ]
    figures = newest_figures([check])
    short = any(claim.bar(figures).holds is False for claim in CLAIMS)
    return EXIT_SHORT if waiting or short else EXIT_HELD


def machine_of(site: MeasuredDevice) -> GpuMachine:
    """Return the GPUs of a machine."""
    assert site.gpu is not None
    return GpuMachine(
        name=site.name, gpus=len(site.gpus), memory_bytes=site.gpu.total_bytes
    )


def require_runnable(chosen: Sequence[Stage], machine: GpuMachine) -> None:
    """Check that at least one of the chosen stages can run on a machine.

    Raises:
        UsageError: If none can.
    """
    stages = [stage for stage in chosen if not stage.every_call]
    reasons = [reason_against(stage, machine) for stage in stages]
    if stages and None not in reasons:
        raise UsageError(
            f"{stages[0].name} cannot run here: {reasons[0]}",
            next_step="Choose other stages, or another machine.",
        )


def require_gpu_of_torch() -> None:
    """Check that the torch of this environment sees the GPU.

    Raises:
        MachineLacks: If it does not, as a CPU build.
    """
    if not gpus_of_torch():
        version = SystemHost().library_versions().get("torch", "not installed")
        raise MachineLacks(
            f"torch {version} of {sys.prefix} sees no GPU",
            next_step=(
                "Activate the environment that has your CUDA build of torch, and run"
                " make gpu-check again."
            ),
            docs="torch-without-cuda",
        )


if __name__ == "__main__":
    sys.exit(main())
