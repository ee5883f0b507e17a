"""``python -m benchmarks.scale``: the input pipeline with 202 million samples.

A dataset with real function lengths and real offsets (1.6 GB), whose token files are
holes, is read in random order, packed into sequences of 512, by a process that starts
with a cold page cache. Measured against bars: the time to open it, the time to the
first batch, how much memory the process takes after 2,000 batches, file pages included,
and how the first batch compares with one from 2 million samples. Starts are repeated
with interleaved sizes; figures are medians.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from autotune.base.tables import text_table
from autotune.base.units import format_bytes, format_count
from benchmarks.bars import Bar, Direction, bars_of, finish, measuring, parser, run
from testbed.programs import run_program

SAMPLES = 202_000_000
FEWER_SAMPLES = 2_000_000
ROWS, ROW_TOKENS = 64, 512
BATCHES = 2_000
REPEATS = 5

BARS: dict[str, tuple[str, Direction, float]] = {
    "scale_open_s": ("s", "<=", 0.2),
    "scale_first_batch_s": ("s", "<=", 2.0),
    "scale_rss_growth_bytes": ("bytes", "<=", 150 * 2**20),
    "scale_first_batch_ratio": ("ratio", "<=", 1.5),
}
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print and return the exit code."""
    options_of = parser("scale", "Feed from 202 million samples.")
    options_of.add_argument(
        "--dir",
        type=Path,
        help="where to make the datasets (1.7 GB); default: a temporary directory",
    )
    options_of.add_argument(
        "--samples", type=int, default=SAMPLES, help="samples of the large dataset"
    )
    options_of.add_argument(
        "--read", type=Path, metavar="DATASET", help=argparse.SUPPRESS
    )
    options_of.add_argument(
        "--batches", type=int, default=BATCHES, help=argparse.SUPPRESS
    )
    options = options_of.parse_args(arguments)
    if options.read:
        print(json.dumps(read(options.read, options.batches)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="scale-") as place:
        figures = measure(Path(place), options.samples, options.batches)
    bars = make_bars(figures)
    return finish(options.json, bars, {"figures": figures}, _table(figures))


def measure(place: Path, samples: int, batches: int) -> dict[str, Any]:
    """Make both datasets and start on them in turn."""
    from testbed.corpora import real_lengths, write_sparse_corpus

    sizes = {"large": samples, "small": min(FEWER_SAMPLES, samples)}
    for name, count in sizes.items():
        sys.stderr.write(f"making a dataset of {format_count(count)} samples\n")
        write_sparse_corpus(place / name, real_lengths(count, seed=0))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sizes}
    caches = set()
    for number in range(REPEATS):
        for name in sizes:
            # Memory is a matter of the last, long run; the others only start.
            long = batches if number == REPEATS - 1 else 1
            caches.add(drop_caches(place))
            runs[name].append(_read_in_child(place / name, long))
            sys.stderr.write(f"{name} dataset, start {number + 1} of {REPEATS}\n")
    shards = len(list((place / "large").glob("*-tokens-*")))
    return {
        "samples": sizes,
        "shards": shards,
        "page_cache": sorted(caches),
        "batches": batches,
        "runs": runs,
    }


def make_bars(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars of a start at full size."""
    large, small = figures["runs"]["large"], figures["runs"]["small"]
    first_s = statistics.median(run["first_batch_s"] for run in large)
    ratio = first_s / statistics.median(run["first_batch_s"] for run in small)
    opened_s = statistics.median(run["open_s"] for run in large)
    growth = large[-1]["rss_growth_bytes"]
    return bars_of(
        BARS, dict(zip(BARS, (opened_s, first_s, growth, ratio), strict=True))
    )


def read(directory: Path, batches: int) -> dict[str, Any]:
    """Open a dataset and take batches, in this process."""
    from trainer.data.batch_plan import make_plan
    from trainer.data.dataset import TokenDataset
    from trainer.data.loader import make_loader, micro_batch_plans
    from trainer.data.micro_batch_source import MicroBatchSource
    from trainer.formats.train_config import ModelSettings, TrainConfig

    config = TrainConfig(
        model=ModelSettings(name="none", config={"model_type": "bert"}),
        seq_length_tokens=ROW_TOKENS,
        micro_batch_size=ROWS,
        global_batch_size=ROWS,
        layout="packed",
    )
    before_bytes = _rss_bytes()
    started_s = time.perf_counter()
    dataset = TokenDataset.open(directory)
    opened_s = time.perf_counter()
    plan = make_plan(config, len(dataset), world_size=1)
    loader = make_loader(
        MicroBatchSource(dataset, config, plan),
        config,
        micro_batch_plans(dataset, config, plan, 0),
    )
    next(loader)
    first_s = time.perf_counter()
    non_padding_tokens = sum(
        batch.non_padding_tokens for batch in islice(loader, batches - 1)
    )
    ended_s = time.perf_counter()
    return {
        "open_s": opened_s - started_s,
        "first_batch_s": first_s - opened_s,
        "rss_growth_bytes": _rss_bytes() - before_bytes,
        "rest_real_tokens_per_s": (
            non_padding_tokens / (ended_s - first_s) if batches > 1 else None
        ),
    }


def _rss_bytes() -> int:
    """Resident memory of this process, mapped file pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def drop_caches(place: Path) -> str:
    """Empty the page cache, for the whole machine if allowed, else for these files.

    Returns:
        Which of the two was done.
    """
    os.sync()
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        for path in place.glob("*/*"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "dropped for these files"
    return "dropped, with names and inodes"


def _read_in_child(directory: Path, batches: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.scale",
        "--read",
        str(directory),
        "--batches",
        str(batches),
    ]
    result: dict[str, Any] = json.loads(run_program(command))
    return result


def _table(figures: dict[str, Any]) -> str:
    rows = []
    for name, count in figures["samples"].items():
        runs = figures["runs"][name]
        opened = statistics.median(run["open_s"] for run in runs)
        first = statistics.median(run["first_batch_s"] for run in runs)
        growth = format_bytes(runs[-1]["rss_growth_bytes"])
        rows.append([format_count(count), f"{opened:.3f} s", f"{first:.3f} s", growth])
    cache = ", ".join(figures["page_cache"])
    title = f"samples (page cache {cache})"
    return text_table(
        [title, "open", "first batch", f"memory after {figures['batches']:,} batches"],
        rows,
    )


if __name__ == "__main__":
    run(main)
