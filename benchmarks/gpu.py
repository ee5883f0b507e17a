"""``python -m benchmarks.gpu --out DIR``: run autotune's own commands on a GPU.

Their answers are kept. The most valuable stages run first, within ``--minutes``; each
answer is written to ``DIR/check.json`` as soon as its stage ends. Run the same command
again to continue: stages that ended are not repeated. ``--keep`` copies answers and
profiles into ``reports/gpu/GPU/DATE``, with predictions beside measured values, and
writes ``docs/reference/gpu.md``.

Nothing is kept of a pretended GPU, of one whose peak is not known, or if a rate exceeds
what the GPU can do.

Exit codes: 0 if all stages ended and no bar is short, 1 if one failed, had no time or
is short, 2 if nothing could be measured or nothing may be kept, 130 after Ctrl-C.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import autotune
from autotune.base.files import check_writable, write_atomically
from autotune.base.process import end_with_parent
from autotune.base.readable_json import readable_json
from autotune.base.tables import markdown_table
from autotune.base.units import format_bytes, format_count, format_seconds, format_share
from autotune.baseline.values import RecipeName
from autotune.errors import (
    EXIT_INTERRUPTED,
    AutotuneError,
    MachineLacks,
    UsageError,
)
from autotune.machine.host import SystemHost
from autotune.machine.measured_device import MeasuredDevice, open_device
from autotune.machine.nvml import NvmlMonitor, gpus_of_torch
from autotune.machine.values import is_pretended
from autotune.memory.values import ProbeEvidence
from autotune.profiles.store import read_profile
from autotune.profiles.values import Profile
from autotune.trials.decide.plausibility import SLACK
from autotune.trials.decide.profile_rates import check_profile
from autotune.trials.decide.run_rates import check_run
from benchmarks.bars import EXIT_HELD, EXIT_SHORT, EXIT_UNMEASURED, Bar
from testbed.corpora import real_lengths, write_learnable_corpus
from trainer.code_hash import code_sha256
from trainer.data.manifest import read_manifest
from trainer.errors import TrainerError
from trainer.model.gpu_peaks import peak_flops_per_s
from trainer.record.run_record import RUN_FILE, Run, read_run

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "reports" / "gpu"
PAGE = ROOT / "docs" / "reference" / "gpu.md"
MARK = "<!-- Written by make gpu-check from here on. -->"
CHECK_NAME, LOGS, RUNS, PROFILES, SAVES_NAME = (
    "check.json",
    "logs",
    "runs",
    "profiles",
    "saves.json",
)
ENDED, FAILED, CUT_OFF, NO_TIME = "ended", "failed", "cut off", "no time"
ENDING_S = 20.0
"""A training that is asked to end saves first; then it is killed."""
_POLL_S, _TAIL_LINES = 0.1, 12
_SIZE, _DEPTH, _REPEATS = 8192, 128, 20
_LEAST_OF_PEAK_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command."""

    name: str
    words: tuple[str, ...]
    """Arguments of Python."""
    least_s: float
    """Not begun with less time than this."""
    most_s: float
    needs: str = "."
    """A path that an earlier stage wrote."""
    gpus: int = 1
    answer: str | None = None
    """The file that holds its JSON; None for standard output."""
    exit_codes: tuple[int, ...] = (0,)
    """Of an end that counts."""
    minutes_share: float = 0.8
    """Of its time; what ``{minutes}`` becomes."""


MEMORY = {
    "bert-120m-dropout": "--model bert-120m --attention-dropout 0.1",
    "bert-120m-eager": "--model bert-120m --no-compile",
    "bert-120m-full": "--model bert-120m --activation-checkpointing full",
    "bert-120m-selective": (
        "--model bert-120m --no-compile --activation-checkpointing selective"
    ),
    "bert-120m-fp32-padded": "--model bert-120m --precision fp32 --layout padded",
    "bert-120m-128": "--model bert-120m --seq-length 128",
    "bert-350m-full": "--model bert-350m --activation-checkpointing full",
    "bert-350m-fp32-padded": "--model bert-350m --precision fp32 --layout padded",
    "modernbert-base": "--model modernbert-base",
    "modernbert-base-fp32": "--model modernbert-base --precision fp32",
    "modernbert-base-1024-full": (
        "--model modernbert-base --seq-length 1024 --activation-checkpointing full"
    ),
    "modernbert-large": "--model modernbert-large",
}
"""Further configurations whose memory is predicted and measured: options of estimate
and probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything."""

    models: tuple[str, ...] = ("bert-120m", "bert-350m")
    memory: Mapping[str, str] = field(default_factory=lambda: MEMORY)
    eager: str = ""
    """Options of predictions and probes, so that layers are not compiled."""
    probe: str = "--time-limit {minutes}min"
    """Options of commands that probe."""
    window: str = ""
    """Options of commands that time windows."""
    tune: str = ""
    """Options of the tuning of all models."""
    seq_length: int = 512
    steps: int = 40
    """Of a training."""
    save_repeats: int = 5
    patience: float = 1.0
    """Times the longest that a stage may take."""
    minutes_share: float = 0.8
    """Of a stage's time, for its measurements; processes start and end in the rest."""
    samples: int = 100_000
    vocab_size: int = 30_522


FULL = Sizes()
TINY = Sizes(
    models=("bert-mini",),
    memory={},
    eager=" --no-compile",
    probe=(
        "--max-micro-batch-size 4 --trial-timeout 120s --global-batch-tokens 1024"
        " --time-limit 10min"
    ),
    window="--window 0.3s",
    tune="--skip workers --skip network --skip baseline",
    seq_length=64,
    steps=4,
    save_repeats=1,
    patience=3.0,
    minutes_share=0.06,
    samples=400,
    vocab_size=500,
)


def stages_of(sizes: Sizes) -> Iterator[Stage]:
    """Yield all stages, the most valuable first."""

    def command(
        name: str, words: str, least_s: float, most_s: float, needs: str = "."
    ) -> Stage:
        gpus = 2 if name.startswith(("network", "scale")) else 1
        arguments = ("-m", "autotune", *words.split())
        longest_s, share = sizes.patience * most_s, sizes.minutes_share
        return Stage(
            name=name,
            words=arguments,
            least_s=least_s,
            most_s=longest_s,
            needs=needs,
            gpus=gpus,
            minutes_share=share,
        )

    def memory(name: str, options: str, probe: str, most_s: float) -> Iterator[Stage]:
        options = f"--data data --seq-length {sizes.seq_length} {options} --json"
        yield command(f"estimate-{name}", f"estimate {options}", 15, 120)
        # Limited, as layers are compiled for each size: smaller sizes are left out.
        yield command(
            f"probe-{name}",
            f"probe {options} {probe} --here --out {PROFILES}/{name}.toml",
            45,
            most_s,
        )

    yield command("doctor", "doctor --measure --json", 5, 120)
    confirm = "from benchmarks import gpu; gpu.confirm()"
    yield Stage(name="arithmetic", words=("-c", confirm), least_s=10, most_s=120)
    for model in sizes.models:
        profile, run = f"{PROFILES}/{model}.toml", f"{RUNS}/{model}"
        read = f"{profile} --data data"
        timed = f"{read} --time-limit {{minutes}}min --here --json"
        local = (
            f"train {read} --set train.max_steps={sizes.steps} --set"
            " train.log_interval_steps=2"
        )
        local = f"{local} --set train.checkpoint.enabled=false"
        yield from memory(model, f"--model {model}{sizes.eager}", sizes.probe, 300)
        yield command(f"train-{model}", f"{local} --out {run}", 60, 300, profile)
        yield command(
            f"baseline-{model}", f"baseline {timed} {sizes.window}", 60, 240, profile
        )
        if model == sizes.models[0]:
            yield command(
                f"workers-{model}", f"workers {timed} {sizes.window}", 60, 240, profile
            )
            yield command(f"network-{model}", f"network {timed}", 60, 240, profile)
            yield command(
                f"scale-{model}",
                f"network --predict {read} --bandwidth 100Gbit --json",
                10,
                60,
                profile,
            )
            yield command(f"advise-{model}", f"advise {run} {read} --json", 10, 60, run)
    for name, options in sizes.memory.items():
        yield from memory(name, options, f"--trial-timeout 80s {sizes.probe}", 120)
    tune = " ".join(
        [
            "tune",
            *(f"--model {model}" for model in sizes.models),
            sizes.probe,
            sizes.window,
            sizes.tune,
        ]
    )
    tune = f"{tune} --data data --seq-length {sizes.seq_length} --here --json"
    yield command(
        "tune", f"{tune} --out tune/{PROFILES} --reports tune/reports", 300, 1200
    )
    saves = (
        f"-m benchmarks.checkpoint --device cuda --only-stall --model {sizes.models[0]}"
        f" --dir . --json {SAVES_NAME}"
    )
    saves = f"{saves} --repeats {sizes.save_repeats}"
    codes = (EXIT_HELD, EXIT_SHORT, EXIT_UNMEASURED)
    yield Stage(
        name="saves",
        words=tuple(saves.split()),
        least_s=60,
        most_s=240,
        answer=SAVES_NAME,
        exit_codes=codes,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages for which the time suffices, and print the results.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Measure what a GPU reaches."
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory for answers and logs",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="time limit of all stages together (default: 10)",
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
    options = parser.parse_args(arguments)
    sizes = TINY if options.tiny else FULL
    # Ends what was started, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = options.out.absolute()
    try:
        check_writable(out)
        with contextlib.closing(NvmlMonitor()) as monitor:
            site = open_device("cuda", out, SystemHost(), monitor)
        require_gpu_of_torch()
        chosen = select(tuple(stages_of(sizes)), options.only, len(site.gpus))
        end_s = time.monotonic() + 60 * options.minutes
        make_data(out, options.data, sizes)
        check = open_check(out, site, tiny=options.tiny)
        run_stages(check, chosen, out, end_s)
        check["figures"] = figures_of(out, check["stages"])
    except (AutotuneError, TrainerError) as error:
        sys.stderr.write(f"error: {error.message}\n  next: {error.next_step}\n")
        return EXIT_UNMEASURED
    except KeyboardInterrupt:
        sys.stderr.write(
            f"interrupted: the stages that ended are in {out / CHECK_NAME}\n"
        )
        return EXIT_INTERRUPTED
    write_atomically(out / CHECK_NAME, readable_json(check))
    print(results([check]))
    if options.keep:
        if reasons := reasons_against(out, check):
            sys.stderr.write(
                "".join(f"error: nothing is kept: {reason}\n" for reason in reasons)
            )
            return EXIT_UNMEASURED
        print(f"kept: {keep(out, check, KEPT)}")
        write_page()
    complete = all(
        check["stages"].get(stage.name, {}).get("status") == ENDED for stage in chosen
    )
    short = any(bar.holds is False for bar, _, _ in claims_of(check["figures"]))
    return EXIT_SHORT if short or not complete else EXIT_HELD


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


def select(stages: Sequence[Stage], only: str, gpus: int) -> list[Stage]:
    """Return the stages that ``gpus`` GPUs can run.

    They are all stages, or those with these names or prefixes.

    Raises:
        UsageError: If a name matches none, or there are too few GPUs for all of them.
    """
    names = {stage.name for stage in stages}
    wanted = tuple(prefix for prefix in only.split(",") if prefix)
    if unknown := [
        prefix
        for prefix in wanted
        if not any(name.startswith(prefix) for name in names)
    ]:
        raise UsageError(
            f"stage {unknown[0]!r} not found",
            next_step=f"Choose from {', '.join(sorted(names))}.",
        )
    beginnings = (
        tuple(prefix for prefix in wanted if prefix not in names) if wanted else ("",)
    )
    chosen = [
        stage
        for stage in stages
        if stage.name in wanted or stage.name.startswith(beginnings)
    ]
    if all(stage.gpus > gpus for stage in chosen):
        raise UsageError(
            f"{only} requires {chosen[0].gpus} GPUs",
            next_step="Choose other stages, or more GPUs.",
        )
    return [stage for stage in chosen if stage.gpus <= gpus]


def open_check(out: Path, site: MeasuredDevice, *, tiny: bool) -> dict[str, Any]:
    """Continue the check in a directory, or begin one.

    Raises:
        AutotuneError: If the directory holds a check of something else.
    """
    assert site.gpu is not None
    made_with = {
        "gpu": site.gpu.name,
        "gpus": len(site.gpus),
        "driver": site.gpu.driver,
        "torch": site.versions.get("torch"),
        "transformers": site.versions.get("transformers"),
        "dataset": read_manifest(out / "data").dataset_hash,
        "sources": [
            code_sha256(ROOT / package)[:8] for package in ("autotune", "trainer")
        ],
        "tiny": tiny,
    }
    if (out / CHECK_NAME).is_file():
        check: dict[str, Any] = json.loads((out / CHECK_NAME).read_text())
        if check["made_with"] != made_with:
            changed = [
                name
                for name, value in made_with.items()
                if check["made_with"].get(name) != value
            ]
            raise AutotuneError(
                f"{out / CHECK_NAME} was measured with another {', '.join(changed)}",
                next_step="Choose another --out.",
            )
    else:
        started_utc = datetime.now(UTC).isoformat(timespec="seconds")
        check = {
            "name": site.name,
            "tool_version": autotune.__version__,
            "started_utc": started_utc,
            "made_with": made_with,
        }
    # Of any visit: what stands in for a GPU is told so by its environment.
    pretended = {name for name in os.environ if name.startswith("NULLGPU_")} | set(
        check.get("pretended_by", ())
    )
    return check | {
        "pretended_by": sorted(pretended),
        "stages": check.get("stages", {}),
    }


def make_data(out: Path, given: Path | None, sizes: Sizes) -> None:
    """Put the dataset at ``data``.

    It is the given one, or one of real lengths whose ids mean nothing.
    """
    data = out / "data"
    if given is not None and not data.exists():
        data.symlink_to(given.absolute())
    elif given is None and not data.exists():
        partial = out / "data.partial"
        shutil.rmtree(partial, ignore_errors=True)
        lengths = (
            real_lengths(sizes.samples, seed=0),
            real_lengths(sizes.samples // 50, seed=1),
        )
        write_learnable_corpus(partial, *lengths, vocab_size=sizes.vocab_size).rename(
            data
        )
    elif given is not None and data.resolve() != given.resolve():
        raise AutotuneError(
            f"{data} is another dataset than {given}", next_step="Choose another --out."
        )


def run_stages(
    check: dict[str, Any], stages: Sequence[Stage], out: Path, end_s: float
) -> None:
    """Run the stages that have not ended yet, and write the check after each."""
    for stage in stages:
        if check["stages"].get(stage.name, {}).get("status") == ENDED:
            continue
        left_s = end_s - time.monotonic()
        if left_s < stage.least_s:
            result = check["stages"].get(stage.name, {"status": NO_TIME})
        elif not (out / stage.needs).exists():
            result = {
                "status": FAILED,
                "said": (
                    f"{stage.needs} is missing: the stage that writes it did not end"
                ),
            }
        else:
            sys.stderr.write(
                f"{stage.name}: at most {min(stage.most_s, left_s):.0f} s\n"
            )
            result = run_stage(stage, out, min(stage.most_s, left_s))
        said = (result.get("said") or "").splitlines()
        sys.stderr.write(
            f"{stage.name}: {result['status']}{f' ({said[-1]})' if said else ''}\n"
        )
        check["stages"][stage.name] = result
        write_atomically(out / CHECK_NAME, readable_json(check))


def run_stage(stage: Stage, out: Path, limit_s: float) -> dict[str, Any]:
    """Run one command within its time; nothing that it started outlives it."""
    minutes = max(0.1, stage.minutes_share * limit_s / 60)
    words = [word.replace("{minutes}", f"{minutes:.2f}") for word in stage.words]
    (out / LOGS).mkdir(exist_ok=True)
    output_file, log_file = (
        out / LOGS / f"{stage.name}{ending}" for ending in (".json", ".log")
    )
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    began_s, began = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    with output_file.open("w") as stdout, log_file.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=out,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=functools.partial(end_with_parent, os.getpid()),  # noqa: PLW1509 - two system calls, no locks
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )
        try:
            cut_off = not _ends_within(process, max(limit_s - ENDING_S, limit_s / 2))
        finally:
            if not _ends_within(process, 0.0):
                process.terminate()
                _ends_within(process, min(ENDING_S, limit_s / 2))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    status = (
        CUT_OFF
        if cut_off
        else ENDED
        if process.returncode in stage.exit_codes
        else FAILED
    )
    answer = (
        _without_paths(
            (out / stage.answer if stage.answer else output_file).read_text(), out
        )
        if status == ENDED
        else ""
    )
    tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    return {
        "status": status,
        "command": ["python", *words],
        "began_utc": began,
        "seconds": round(time.monotonic() - began_s, 1),
        "answer": _parsed(answer),
        "said": (
            None
            if status == ENDED
            else _without_paths(f"exit code {process.returncode}\n{tail}", out)
        ),
    }


def _parsed(answer: str) -> Any:
    """Return None for text that is not JSON: a training prints none."""
    try:
        return json.loads(answer)
    except ValueError:
        return None


def _ends_within(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for a process's end without reaping it.

    So no other process gets its number before its group is killed.
    """
    end_s = time.monotonic() + seconds
    while (
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    ):
        if time.monotonic() >= end_s:
            return False
        time.sleep(_POLL_S)
    return True


def _without_paths(text: str, out: Path) -> str:
    """Remove this machine's paths and the GPUs' serial ids: results are passed on."""
    text = re.sub(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "GPU", text)
    for directory, name in (
        (out, "."),
        (ROOT, "."),
        (Path(sys.prefix), "python"),
        (Path.home(), "~"),
    ):
        text = text.replace(str(directory), name) if len(directory.parts) > 1 else text
    return text


def confirm() -> None:
    """Print whether matmuls on the GPU are right, and how fast they are.

    A pretended GPU computes nothing.
    """
    import torch

    left = torch.randint(
        -1, 2, (_SIZE, _DEPTH), generator=torch.Generator().manual_seed(0)
    ).float()
    right = torch.randint(
        -1, 2, (_DEPTH, _SIZE), generator=torch.Generator().manual_seed(1)
    ).float()
    # Whole numbers up to 128 are exact in bf16, in whichever order they are summed.
    product = (
        (left.to("cuda", torch.bfloat16) @ right.to("cuda", torch.bfloat16))
        .float()
        .cpu()
    )
    square = torch.ones(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16)
    starts, ends = (
        [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS)]
        for _ in range(2)
    )
    for start, end in zip(starts, ends, strict=True):
        start.record()
        torch.mm(square, square)
        end.record()
    torch.cuda.synchronize()
    seconds = (
        statistics.median(a.elapsed_time(b) for a, b in zip(starts, ends, strict=True))
        / 1e3
    )
    print(
        json.dumps(
            {
                "right": torch.equal(product, left @ right),
                "flops_per_s": 2 * _SIZE**3 / max(seconds, 1e-9),
            }
        )
    )


def reasons_against(out: Path, check: Mapping[str, Any]) -> list[str]:
    """Return the reasons not to keep a check.

    They are anything that is not shown to be real and plausible.
    """
    made_with, stages = check["made_with"], check["stages"]
    gpu, driver = made_with.get("gpu"), made_with.get("driver")
    peak = peak_flops_per_s(gpu, "bf16") if gpu else None
    reasons = (
        ["it tried the check itself, with tiny sizes"]
        if made_with.get("tiny") is not False
        else []
    )
    if check["pretended_by"]:
        reasons.append(f"a pretended GPU: {', '.join(check['pretended_by'])} is set")
    if not driver or is_pretended(driver) or "nullgpu" in json.dumps(stages).lower():
        reasons.append(
            f"a pretended {gpu} (driver {driver})"
            if driver
            else "its driver is not known"
        )
    if peak is None:
        reasons.append(
            f"no peak is known of {gpu}, so no rate can be checked: add it to"
            " trainer/model/gpu_peaks.py"
        )
    proof = (stages.get("arithmetic") or {}).get("answer") or {}
    if proof.get("right") is not True:
        reasons.append(f"a pretended {gpu}: its matmuls are wrong, or were not checked")
    if (
        peak is not None
        and not _LEAST_OF_PEAK_SHARE * peak
        < proof.get("flops_per_s", 0.0)
        < SLACK * peak
    ):
        reasons.append(
            f"matmuls at {proof.get('flops_per_s', 0.0):.3g} FLOP/s are not plausible"
            f" for {gpu}"
        )
    measured = list(_measured(out))
    reasons += [] if measured else ["no profile was measured"]
    for path, read in measured:
        try:
            measured_gpu, measured_driver = read(path)
        except (AutotuneError, TrainerError) as error:
            reasons.append(f"{path.relative_to(out)}: {error.message}")
            continue
        if (measured_gpu, measured_driver) != (gpu, driver):
            reasons.append(
                f"{path.relative_to(out)} is of {measured_gpu},"
                f" driver {measured_driver}"
            )
    return reasons


def _measured(
    out: Path,
) -> Iterator[tuple[Path, Callable[[Path], tuple[str | None, str | None]]]]:
    """Yield every profile and run.

    Each has a function that checks its rates and returns its GPU and driver.
    """

    def of_profile(path: Path) -> tuple[str | None, str | None]:
        stored = read_profile(path)
        if not stored.intact:
            raise AutotuneError("it was edited", next_step="Probe again.")
        check_profile(stored.profile)
        return stored.profile.fingerprint.gpu_name, stored.profile.fingerprint.driver

    def of_run(path: Path) -> tuple[str | None, str | None]:
        run = read_run(path.parent)
        check_run(run)
        return run.header.device, run.header.driver

    yield from (
        (path, of_profile) for path in sorted(out.glob(f"**/{PROFILES}/*.toml"))
    )
    yield from ((path, of_run) for path in sorted(out.glob(f"{RUNS}/*/{RUN_FILE}")))


def figures_of(out: Path, stages: Mapping[str, Any]) -> dict[str, Any]:
    """Read measured values, beside predicted ones.

    They are from profiles, runs and answers of the stages that ended.
    """
    ended = {name: stage for name, stage in stages.items() if stage["status"] == ENDED}
    answers = {name: stage["answer"] or {} for name, stage in ended.items()}
    profiles = {
        path.stem: read_profile(path).profile
        for path in sorted(out.glob(f"{PROFILES}/*.toml"))
    }
    runs = {
        path.stem: read_run(path)
        for path in sorted(out.glob(f"{RUNS}/*"))
        if f"train-{path.stem}" in ended
    }
    memory = [
        _memory(name, answers.get(f"estimate-{name}", {}), probe)
        for name, profile in profiles.items()
        if (probe := profile.evidence.probe) is not None
    ]
    baseline = [
        {"model": name, "compared_with": row.name, "tuned_to_theirs_ratio": row.speedup}
        for name, profile in profiles.items()
        for row in (profile.evidence.baseline.rows if profile.evidence.baseline else ())
        if row.speedup is not None and row.name != "tuned"
    ]
    workers = [
        {
            "model": name,
            "num_workers": sweep.chosen,
            "data_wait_share": row.data_wait_share,
        }
        for name, profile in profiles.items()
        if (sweep := profile.evidence.workers) is not None
        and not sweep.undecided_between
        for row in sweep.rows
        if row.num_workers == sweep.chosen
    ]
    network = [
        {
            "model": name,
            "strategy": row.strategy,
            "predicted_step_s": row.predicted_step_s,
            "step_s": row.step_s,
        }
        for name, profile in profiles.items()
        for row in (
            profile.evidence.network.gradient_syncs if profile.evidence.network else ()
        )
        if row.step_s is not None
    ]
    tuned = [
        read_profile(path).profile.evidence.workers
        for path in out.glob(f"tune/{PROFILES}/*.toml")
    ]
    # Else its time ended it.
    decided = all(sweep is not None and not sweep.undecided_between for sweep in tuned)
    saves = {
        bar["name"]: bar["figure"] for bar in answers.get("saves", {}).get("bars", ())
    }
    return {
        "matmul_flops_per_s": answers.get("arithmetic", {}).get("flops_per_s"),
        "memory": memory,
        "training": [_training(name, run, profiles) for name, run in runs.items()],
        "baseline": baseline,
        "workers": workers,
        "network": network,
        "tune_s": ended["tune"]["seconds"] if "tune" in ended and decided else None,
        "asynchronous_save_share": saves.get("checkpoint_stall_of_synchronous_share"),
    }


def _memory(
    name: str, estimated: Mapping[str, Any], probe: ProbeEvidence
) -> dict[str, Any]:
    """Return the largest micro-batch and its peak, measured and predicted.

    They are estimated, traced before any trial, corrected by trials, and measured.
    """
    estimate: Mapping[str, Any] = next(iter(estimated.get("models", ())), {})
    return {
        "configuration": name,
        "estimated_least": estimate.get("micro_batch_size_low"),
        "estimated": estimate.get("micro_batch_size"),
        "estimated_most": estimate.get("micro_batch_size_high"),
        "traced": probe.traced_micro_batch_size,
        "largest": probe.feasible_max,
        "traced_peak_bytes": probe.traced_peak_bytes,
        "corrected_peak_bytes": probe.predicted_peak_bytes,
        "peak_bytes": probe.feasible_peak_bytes,
    }


def _training(name: str, run: Run, profiles: Mapping[str, Profile]) -> dict[str, Any]:
    """Return medians over the second half of a run, and the promised rate.

    The probe of the run's profile promised it.
    """
    rows = run.steps[len(run.steps) // 2 :]

    def median(key: str) -> float | None:
        values = [value for row in rows if (value := getattr(row, key)) is not None]
        return statistics.median(values) if values else None

    profile = profiles.get(name)
    probe = profile.evidence.probe if profile else None
    promised = (
        probe.expected_throughput(run.header.sequences_per_micro_batch)
        if probe
        else None
    )
    return {
        "training": name,
        "steps": rows[-1].step if rows else 0,
        "tokens_per_s_per_gpu": median("tokens_per_s_per_rank"),
        "mfu_share": median("mfu"),
        "mfu_6n_share": median("mfu_6n"),
        "probed_positions_per_s": promised.padded_tokens_per_s if promised else None,
        "positions_per_s": median("padded_tokens_per_s"),
        "peak_bytes": rows[-1].peak_memory_bytes if rows else None,
    }


def claims_of(figures: Mapping[str, Any]) -> list[tuple[Bar, str, str]]:
    """Compare figures with their bars, which were set before any measurement.

    A bar stays open if its figure was not measured.

    Returns:
        Each bar with its meaning and the stage that measures it.
    """
    memory, training = figures.get("memory", ()), figures.get("training", ())

    def errors(key: str) -> list[float]:
        return [abs(row[key] / row["peak_bytes"] - 1) for row in memory if row[key]]

    def mfu(model: str) -> list[float]:
        return [
            row["mfu_share"]
            for row in training
            if model in row["training"] and row["mfu_share"]
        ]

    def ratios(recipe: RecipeName) -> list[float]:
        return [
            row["tuned_to_theirs_ratio"]
            for row in figures.get("baseline", ())
            if row["compared_with"] == recipe
        ]

    before, corrected = errors("traced_peak_bytes"), errors("corrected_peak_bytes")
    above = [row["traced"] / row["largest"] - 1 for row in memory if row["traced"]]
    waits = [row["data_wait_share"] for row in figures.get("workers", ())]
    probed = "estimate,probe"
    rows: tuple[tuple[str, float | None, Literal["<=", ">="], float, str, str], ...] = (
        (
            "configurations_count",
            len(before) or None,
            ">=",
            12,
            "configurations, predicted and measured",
            probed,
        ),
        (
            "peak_median_error_share",
            _over(statistics.median, before),
            "<=",
            0.03,
            "median error of the peak memory predicted before any trial",
            probed,
        ),
        (
            "peak_worst_error_share",
            _over(max, before),
            "<=",
            0.06,
            "worst error of that prediction",
            probed,
        ),
        (
            "corrected_median_error_share",
            _over(statistics.median, corrected),
            "<=",
            0.01,
            "median error once smaller trials corrected it",
            probed,
        ),
        (
            "above_largest_share",
            _over(max, above),
            "<=",
            0.03,
            "predicted largest micro-batch above the measured one, worst",
            probed,
        ),
        (
            "bert_120m_mfu_share",
            _over(max, mfu("bert-120m")),
            ">=",
            0.45,
            "MFU of bert-120m",
            "probe-bert-120m,train-bert-120m",
        ),
        (
            "bert_350m_mfu_share",
            _over(max, mfu("bert-350m")),
            ">=",
            0.50,
            "MFU of bert-350m",
            "probe-bert-350m,train-bert-350m",
        ),
        (
            "against_paper_ratio",
            _over(min, ratios("paper")),
            ">=",
            15.0,
            "non-padding tokens/s, tuned ÷ paper baseline",
            "probe-bert-120m,probe-bert-350m,baseline",
        ),
        (
            "against_hf_trainer_ratio",
            _over(min, ratios("hf-trainer")),
            ">=",
            2.5,
            "non-padding tokens/s, tuned ÷ transformers' Trainer",
            "probe-bert-120m,probe-bert-350m,baseline",
        ),
        (
            "data_wait_share",
            _over(max, waits),
            "<=",
            0.01,
            "data wait with the chosen num_workers",
            "probe-bert-120m,workers",
        ),
        (
            "tune_s",
            figures.get("tune_s"),
            "<=",
            900.0,
            "autotune tune of both presets",
            "tune",
        ),
        (
            "asynchronous_save_share",
            figures.get("asynchronous_save_share"),
            "<=",
            0.20,
            "cost of an asynchronous save ÷ that of a synchronous one",
            "saves",
        ),
    )
    return [
        (
            Bar(
                name=name,
                figure=figure,
                unit=name.rpartition("_")[2],
                bar=bar,
                direction=direction,
            ),
            meaning,
            stages,
        )
        for name, figure, direction, bar, meaning, stages in rows
    ]


def _over(combine: Callable[[list[float]], float], values: list[float]) -> float | None:
    return combine(values) if values else None


def keep(out: Path, check: Mapping[str, Any], kept: Path) -> Path:
    """Copy answers, figures and profiles to ``kept/GPU/DATE``.

    They replace those of that date.
    """
    place: Path = kept / check["name"] / check["started_utc"][:10]
    shutil.rmtree(place / PROFILES, ignore_errors=True)
    shutil.copytree(out / PROFILES, place / PROFILES)
    write_atomically(place / CHECK_NAME, readable_json(check))
    return place


def page(written: str, kept: Path) -> str:
    """Return the page with its hand-written part, and every kept check.

    The checks are behind the mark, the newest first.
    """
    checks = [json.loads(path.read_text()) for path in kept.glob(f"*/*/{CHECK_NAME}")]
    checks.sort(key=lambda check: str(check["started_utc"]), reverse=True)
    return f"{written.partition(MARK)[0]}{MARK}\n\n{results(checks)}"


def write_page() -> None:
    """Write the results of all kept checks into the documentation."""
    write_atomically(PAGE, page(PAGE.read_text(), KEPT))


def results(checks: Sequence[Mapping[str, Any]]) -> str:
    """Return every claim with its bar, per GPU, and the tables behind it.

    Without a check, the stages that would measure the claims are named.
    """
    blocks = [] if checks else [_claims({})]
    for check in checks:
        figures, made_with = check["figures"], check["made_with"]
        rate = _number("flops_per_s", figures["matmul_flops_per_s"])
        where = (
            f"Driver {made_with['driver']}, torch {made_with['torch']}. Large bf16"
            f" matmuls reach {rate}."
        )
        blocks += [
            (
                f"### {made_with['gpus']} x {made_with['gpu']},"
                f" {check['started_utc'][:10]}"
            ),
            where,
            _claims(figures),
        ]
        for name in ("memory", "training", "baseline", "workers", "network"):
            if rows := figures[name]:
                head = [_headed(key) for key in rows[0]]
                cells = [
                    [_number(key, value) for key, value in row.items()] for row in rows
                ]
                blocks.append(markdown_table(head, cells, align="l" + "r" * len(head)))
    return "\n\n".join(blocks) + "\n"


def _headed(key: str) -> str:
    """Show a key as a column's title; its unit stands in the cells."""
    for unit in ("_bytes", "_share", "_ratio"):
        key = key.removesuffix(unit)
    key = (
        key.replace("step_s", "step")
        .replace("_per_s", "/s")
        .replace("tuned_to_theirs", "speedup")
    )
    return key.replace("mfu", "MFU").replace("gpu", "GPU").replace("_", " ")


def _claims(figures: Mapping[str, Any]) -> str:
    rows = [
        "| claim | measured | target | | stages that measure it |",
        "|---|---:|---:|---|---|",
    ]
    verdicts = {True: "ok", False: "**below target**", None: "not measured"}
    for bar, meaning, stages in claims_of(figures):
        target = f"{'≥' if bar.direction == '>=' else '≤'} {_number(bar.name, bar.bar)}"
        verdict = verdicts[bar.holds]
        rows.append(
            f"| {meaning} | {_number(bar.name, bar.figure)} | {target} | {verdict} |"
            f" `--only {stages}` |"
        )
    return "\n".join(rows)


def _number(name: str, value: str | float | None) -> str:
    """Show a value in the unit that its name ends in."""
    if value is None or isinstance(value, str):
        return value or "n/a"
    if name.endswith("flops_per_s"):
        return f"{value / 1e12:.4g} TFLOP/s"
    if name.endswith("_per_s") or "_per_s_" in name:
        return format_count(value)
    for unit, show in (
        ("_bytes", format_bytes),
        ("_share", format_share),
        ("_s", format_seconds),
    ):
        if name.endswith(unit):
            return show(value)
    return f"{value:,.4g}"


if __name__ == "__main__":
    sys.exit(main())
