"""``python -m benchmarks.checkpoint``: the cost of saving and of resuming.

*Stall*: optimizer steps of ``bert-120m`` (1.3 GB of weights and optimizer state) are
taken in interleaved blocks without a save, with a synchronous one at the block's
beginning, and with an asynchronous one. The time that a block takes longer than one
without is the cost of the save, the disturbance by the writing thread included.
``torch.save`` of the same state, synced, is shown for comparison.

*Resume*: ``python -m trainer`` resumes at 202 million samples from a checkpoint near
the start of the first epoch, and from the same one with its position moved to the
middle, with a cold page cache, interleaved. Counted is the time from the rendezvous of
the ranks to the first forward pass, in which dataset, model, checkpoint and first batch
are loaded, as in ``startup.json``.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from autotune.base.tables import text_table
from autotune.base.units import format_bytes
from benchmarks.bars import Bar, Direction, bars_of, finish, measuring, parser, run
from testbed.programs import run_program
from trainer.checkpoint.stored_checkpoints import list_checkpoints
from trainer.formats.cpu_environment import CPU_ENVIRONMENT

MODEL = "bert-120m"
STEPS, REPEATS = 6, 11
ROW_TOKENS, ROWS = 64, 2
DEFAULT_INTERVAL_S = 600.0
BARS: dict[str, tuple[str, Direction, float]] = {
    "checkpoint_stall_of_synchronous_share": ("share", "<=", 0.20),
    "checkpoint_stall_of_interval_share": ("share", "<=", 0.02),
    "checkpoint_resume_middle_ratio": ("ratio", "<=", 1.5),
}
SAMPLES = 202_000_000


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print and return the exit code."""
    options_of = parser("checkpoint", "What checkpoints cost.")
    options_of.add_argument(
        "--dir", type=Path, help="where to write (6 GB); default: a temporary directory"
    )
    options_of.add_argument(
        "--model", default=MODEL, help="a preset whose state is saved"
    )
    options_of.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="of the saves; resuming has none",
    )
    options_of.add_argument(
        "--only-stall",
        action="store_true",
        help="what reading a position costs is the host's alone",
    )
    options_of.add_argument(
        "--repeats", type=int, default=REPEATS, help="blocks of each kind"
    )
    options_of.add_argument(
        "--samples", type=int, default=SAMPLES, help="of the dataset that is resumed at"
    )
    options = options_of.parse_args(arguments)
    # As the trainer does on a CPU, before torch is imported.
    os.environ.update({**CPU_ENVIRONMENT, **os.environ})
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="checkpoint-") as place:
        stall = measure_stall(
            Path(place), options.model, options.device, options.repeats
        )
        resume = (
            None
            if options.only_stall
            else measure_resume(Path(place), options.samples, options.repeats)
        )
    bars = make_bars(stall, resume)
    return finish(
        options.json, bars, {"stall": stall, "resume": resume}, _table(stall, resume)
    )


def make_bars(stall: dict[str, Any], resume: dict[str, Any] | None) -> list[Bar]:
    """Compare the cost of saving and resuming with its bars."""
    cost_s = {name: extra_s(stall, name) for name in ("synchronous", "asynchronous")}
    ratio = (
        None
        if resume is None
        else _median(resume["middle_s"]) / _median(resume["start_s"])
    )
    shares = (
        cost_s["asynchronous"] / cost_s["synchronous"],
        cost_s["asynchronous"] / DEFAULT_INTERVAL_S,
    )
    return bars_of(BARS, dict(zip(BARS, (*shares, ratio), strict=True)))


def extra_s(stall: dict[str, Any], name: str) -> float:
    """Return the median time that a block with a save took longer than one without."""
    pairs = zip(stall["block_s"][name], stall["block_s"]["none"], strict=True)
    return _median([with_save - without for with_save, without in pairs])


def measure_stall(
    place: Path, model: str, device: Literal["cpu", "cuda"], repeats: int
) -> dict[str, Any]:
    """Interleave blocks of steps with and without saves."""
    from benchmarks.saves import SavingTrainer

    trainer = SavingTrainer(
        place / "stall", model, device, seq_length_tokens=ROW_TOKENS, rows=ROWS
    )
    kinds: dict[str, Callable[[], None]] = {
        "none": lambda: None,
        "synchronous": lambda: trainer.save(asynchronous=False),
        "asynchronous": lambda: trainer.save(asynchronous=True),
        "torch.save": trainer.torch_save,
    }
    # The first of each makes room and warms up.
    for begin in kinds.values():
        begin()
        trainer.steps(1)
        trainer.settle()
    steps = max(STEPS, trainer.steps_of_a_save() + 2)
    block_s: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(repeats):
        for name, begin in kinds.items():
            os.sync()  # nobody pays for what another has left to be written
            started_s = time.perf_counter()
            begin()
            trainer.steps(steps)
            block_s[name].append(time.perf_counter() - started_s)
            trainer.settle()
        sys.stderr.write(f"saves: turn {number + 1} of {repeats}\n")
    return {
        "model": model,
        "device": trainer.device_name,
        "state_bytes": trainer.state_bytes,
        "steps_per_block": steps,
        "block_s": block_s,
        "blocked_s": trainer.blocked_s,
    }


def measure_resume(place: Path, samples: int, repeats: int) -> dict[str, Any]:
    """Resume at the start and in the middle of an epoch, interleaved."""
    from benchmarks.saves import move_to_middle, write_profile
    from benchmarks.scale import drop_caches
    from testbed.corpora import real_lengths, write_sparse_corpus

    sys.stderr.write("making a large dataset\n")
    data = place / "data"
    write_sparse_corpus(data, real_lengths(samples, seed=0))
    profile = write_profile(place / "resume.toml")
    _train(profile, data, place / "run", steps=2)
    checkpoint = list_checkpoints(place / "run" / "checkpoints")[0]
    middle = move_to_middle(checkpoint, data, place / "middle" / checkpoint.name)
    resumed: dict[str, list[float]] = {"start_s": [], "middle_s": []}
    first: dict[str, list[float]] = {"start_s": [], "middle_s": []}
    for number in range(repeats):
        for name, origin in (("start_s", checkpoint), ("middle_s", middle)):
            caches = drop_caches(place)
            out = place / f"resumed-{name}-{number}"
            _train(profile, data, out, steps=3, resume=origin)
            startup = json.loads((out / "startup.json").read_text())
            resumed[name].append(
                startup["build_s"] + startup["restore_s"] + startup["first_batch_s"]
            )
            first[name].append(startup["first_batch_s"])
        sys.stderr.write(f"resumes: turn {number + 1} of {repeats}\n")
    return {"samples": samples, "page_cache": caches, **resumed, "first_batch": first}


def _train(
    profile: Path, data: Path, out: Path, *, steps: int, resume: Path | None = None
) -> None:
    command = [
        sys.executable,
        "-m",
        "trainer",
        str(profile),
        "--data",
        str(data),
        "--out",
        str(out),
    ]
    command += [
        "--set",
        f"train.max_steps={steps}",
        *(["--resume", str(resume)] if resume else []),
    ]
    run_program(command, timeout_s=3600.0)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _table(stall: dict[str, Any], resume: dict[str, Any] | None) -> str:
    blocks = stall["block_s"]
    rows = [
        [
            f"{name} save",
            f"{_median(blocks[name]):.2f} s",
            f"{extra_s(stall, name):.2f} s",
        ]
        for name in ("synchronous", "asynchronous", "torch.save")
    ]
    rows.insert(0, ["no save", f"{_median(blocks['none']):.2f} s", ""])
    title = (
        f"{stall['steps_per_block']} steps of {stall['model']},"
        f" {format_bytes(stall['state_bytes'])} of state"
    )
    text = text_table([title, "time", "more than without"], rows)
    text += (
        f"\nthe loop itself stood still for {_median(stall['blocked_s']):.3f} s in an"
        " asynchronous save\n\n"
    )
    if resume is None:
        return text
    rows = [
        [
            name,
            f"{_median(resume[key]):.3f} s",
            f"{_median(resume['first_batch'][key]):.3f} s",
        ]
        for name, key in (("near the start", "start_s"), ("in the middle", "middle_s"))
    ]
    title = (
        f"resuming at {resume['samples']:,} samples (page cache {resume['page_cache']})"
    )
    return (
        text
        + text_table(
            [title, "dataset, model, checkpoint, first batch", "first batch alone"],
            rows,
        )
        + "\n"
    )


if __name__ == "__main__":
    run(main)
