"""``python -m benchmarks.gpu.workers --json FILE``: the loader's sweep on a GPU, for a fast and a slow dataset.

Needs one GPU, no network and no dataset: lengths are those of real functions, ids mean nothing. Both datasets hold the
same packed rows of 512 under bert-120m in bf16; every sample of the slow one takes longer to read, by as much as makes
one worker need three steps for a batch. Beside throughput and data-wait stand NVML's and GPM's figures of every window.
A figure that could not be had is printed as "not measured", with its reason in the file.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.core.evidence import WorkersEvidence
from autotune.decide.loader_limits import LoaderLimits
from autotune.errors import AutotuneError
from autotune.measure.clock import SystemClock
from autotune.measure.gpu_sampler import GpuSampler
from autotune.measure.host import SystemHost
from autotune.measure.machine import ForkServerMachine, Machine
from autotune.measure.nvml import NvmlMonitor
from autotune.measure.watched import WatchedMachine
from autotune.search.gpu_source import gpu_source
from autotune.search.site import Site, open_site
from autotune.search.trials import TrialRunner
from autotune.search.workers import Sweep, SweepRequest, evidence, with_loader
from autotune.show.tables import text_table
from autotune.show.workers import ALIGN, GPU_ALIGN, GPU_HEADERS, HEADERS, gpu_rows, workers_cells
from autotune.store import Ledger, write_atomically
from benchmarks.bars import EXIT_UNMEASURED, Bar, exit_code, lines
from benchmarks.corpora import real_lengths, write_corpus
from benchmarks.gpu.rig import say
from trainer.config import DataSettings, TrainConfig
from trainer.dataset import read_manifest
from trainer.presets import model_settings

MODEL, ROW_TOKENS, ROWS, SAMPLES = "bert-120m", 512, 96, 200_000
TINY = ("bert-mini", 64, 4, 2000)
SLOW_STEPS = 3.0
"""How many steps one worker takes for a batch of the slow dataset."""
SLOW_ANSWER = 3
SAMPLES_PER_ROW = 2.1
"""In a packed row of 512; a tiny row holds about one."""
WAIT_BAR, GPM_BAR = 0.01, 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep twice, print, write, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.workers", description="Loader workers on a GPU.")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rows", type=int, default=None, help=f"rows of the micro-batch; {ROWS} unless told")
    parser.add_argument("--minutes", type=float, default=4.0, help="time of each sweep")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU, to try the benchmark itself")
    options = parser.parse_args(arguments)
    monitor = NvmlMonitor()
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-workers-") as place:
            site = open_site("cpu" if options.tiny else "cuda", Path(place), SystemHost(), monitor)
            found = _measure(Path(place), site, monitor, options)
    except AutotuneError as error:
        sys.stderr.write(f"error: {error.message}\n  next: {error.next_step}\n")
        return EXIT_UNMEASURED
    finally:
        monitor.close()
    bars = make_bars(found)
    if options.json:
        sweeps = {name: one.model_dump(mode="json") for name, one in found.items()}
        content = {"device": site.name, "tiny": options.tiny, "sweeps": sweeps, "bars": [bar.to_json() for bar in bars]}
        write_atomically(options.json, json.dumps(content, indent=1) + "\n")
    print(_table(found))
    print(lines(bars))
    return exit_code(bars)


def _measure(place: Path, site: Site, monitor: NvmlMonitor, options: argparse.Namespace) -> dict[str, WorkersEvidence]:
    model, row_tokens, rows, samples = TINY if options.tiny else (MODEL, ROW_TOKENS, ROWS, SAMPLES)
    data = write_corpus(place / "data", real_lengths(samples, seed=0))
    config = TrainConfig(
        model=model_settings(model),
        data=DataSettings(dataset_hash=read_manifest(data).dataset_hash),
        seq_length_tokens=row_tokens,
        layout="packed",
        micro_batch_rows=options.rows or rows,
        attention_dropout=0.0,
        precision="fp32" if options.tiny else "bf16",
        device=site.device,
    )
    with ForkServerMachine() as server:
        machine: Machine = server
        if site.gpu is not None:
            machine = WatchedMachine(server, monitor, [site.gpu.uuid], GpuSampler([site.gpu.uuid]), SystemClock())
        bench = _Bench(place, data, site, machine, options)
        found = {"fast": bench.sweep("fast", config, 0.0)}
        step_s = bench.step_s
        samples_of_batch = config.micro_batch_rows * (1.0 if options.tiny else SAMPLES_PER_ROW)
        found["slow"] = bench.sweep("slow", config, SLOW_STEPS * step_s / samples_of_batch)
        machine.close()
    return found


class _Bench:
    def __init__(self, place: Path, data: Path, site: Site, machine: Machine, options: argparse.Namespace) -> None:
        self._place, self._data, self._site, self._machine, self._options = place, data, site, machine, options
        self.step_s = 0.0
        """Of the ceiling of the last sweep."""

    def sweep(self, name: str, config: TrainConfig, delay_s: float) -> WorkersEvidence:
        """One dataset, with as many workers as there are CPUs, and eight at least where they only sleep."""
        limits = LoaderLimits(
            host=self._site.host,
            local_ranks=1,
            batch_bytes=4 * config.micro_batch_rows * config.seq_length_tokens,
            prefetch_batches=config.data.prefetch_batches,
            asked=8 if delay_s else None,
        )
        request = SweepRequest(
            config=with_loader(config, workers=0),
            data_dir=str(self._data),
            limits=limits,
            window_s=0.5 if self._options.tiny else 2.0,
            budget_s=60 * self._options.minutes,
            trial_timeout_s=120.0,
            sample_delay_s=delay_s,
        )
        runner = TrialRunner(
            machine=self._machine,
            ledger=Ledger(self._place / "ledger", name),
            site=name,
            clock=SystemClock(),
            on_trial=lambda label, outcome: say(f"  {name}: {label}") if outcome is not None else None,
        )
        swept = Sweep(request=request, runner=runner)
        choice = swept.run()
        ceiling = swept.rounds[-1].get(None) or swept.rounds[0][None]
        self.step_s = (ceiling.window_end_s - ceiling.window_start_s) / ceiling.steps
        source = gpu_source(self._site, swept.every, replayed=False)
        return evidence(swept, choice, gpu_source=source, disk=None)


def make_bars(found: dict[str, WorkersEvidence]) -> list[Bar]:
    """What the chosen counts leave of data-wait, the slow dataset's answer, and whether the counters were read."""
    waits = [
        next(row for row in one.rows if row.loader_workers == one.chosen).data_wait_share for one in found.values()
    ]
    uses = [row.gpu for one in found.values() for row in one.rows if row.gpu is not None]
    read = [use.gpm_sm_share is not None for use in uses]
    return [
        Bar(name="gpu_workers_data_wait_share", figure=max(waits), unit="share", bar=WAIT_BAR, direction="<="),
        Bar(
            name="gpu_workers_slow_dataset_count",
            figure=abs(found["slow"].chosen - SLOW_ANSWER),
            unit="workers off the answer by arithmetic",
            bar=0,
            direction="<=",
        ),
        Bar(
            name="gpu_workers_rows_with_gpm_share",
            figure=sum(read) / len(read) if read else None,
            unit="share",
            bar=GPM_BAR,
            direction=">=",
        ),
    ]


def _table(found: dict[str, WorkersEvidence]) -> str:
    parts: list[str] = []
    for name, one in found.items():
        rows: list[list[Any]] = [workers_cells(row) for row in one.rows]
        parts += [f"{name} dataset: {one.chosen} ({one.choice})", text_table(HEADERS, rows, align=ALIGN)]
        if counters := gpu_rows(one):
            parts.append(text_table(GPU_HEADERS, counters, align=GPU_ALIGN))
        parts.append(one.gpu_source)
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
