"""Stage ``workers``: the loader's sweep, for a fast and a slow dataset, with NVML's and GPM's figures of every window.

Both sweeps take the same packed rows under the same model; every sample of the slow dataset takes longer to read, by as
much as makes one worker need 2.7 steps for a batch, so that by arithmetic three are enough, with some air, and two not.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from autotune.core.evidence import WorkersEvidence, WorkersRow
from autotune.decide.loader_limits import LoaderLimits
from autotune.measure.machine import Machine
from autotune.measure.watched import WatchedMachine
from autotune.search.gpu_source import gpu_source
from autotune.search.workers import Sweep, SweepRequest, evidence, with_loader
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import Rig, TimeBox, say
from trainer.batch import row_statistics
from trainer.config import DataSettings, TrainConfig
from trainer.dataset import TokenDataset, read_manifest
from trainer.presets import model_settings

SLOW_STEPS = 2.7
"""How many steps one worker takes for a batch of the slow dataset."""
SLOW_ANSWER = 3
"""The count that follows."""
TRIAL_TIMEOUT_S = 120.0
SWEEP_SHARE = 0.8
"""Of a sweep's box, for its windows: processes start beside them."""


def measure(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """Sweep the fast dataset, then the slow one, whose delay follows from the step that was measured."""
    sizes = rig.sizes
    config = TrainConfig(
        model=model_settings(sizes.model),
        data=DataSettings(dataset_hash=read_manifest(rig.data).dataset_hash),
        seq_length_tokens=sizes.seq_length_tokens,
        layout="packed",
        micro_batch_rows=sizes.workers_rows,
        global_batch_rows=sizes.workers_rows,  # so that a step is one batch of the loader's
        attention_dropout=0.0,
        precision=sizes.precision,
        device=rig.site.device,
    )
    with contextlib.closing(TokenDataset.open(rig.data)) as dataset:
        samples_per_step = config.micro_batch_rows * row_statistics(config, dataset).mean_samples
    delay_s, waits, undecided = 0.0, [], []
    for name in ("fast", "slow"):
        found, step_s = _sweep(rig, config, delay_s, name, box.part(0.5) if name == "fast" else box)
        chosen = next(row for row in found.rows if row.loader_workers == found.chosen)
        waits.append(chosen.data_wait_share)
        undecided += [name] if found.undecided_between else []
        _write(sheet, name, found, chosen)
        delay_s = SLOW_STEPS * step_s / samples_per_step
    lacking = f"its time ended before the sweep of the {' and the '.join(undecided)} dataset was decided"
    sheet.measured("chosen_data_wait_share", None if undecided else max(waits), expected=0.0, lacking=lacking)
    off = None if "slow" in undecided else abs(found.chosen - SLOW_ANSWER)
    sheet.measured("slow_dataset_workers_off_count", off, expected=0.0, lacking=lacking)


def _sweep(rig: Rig, config: TrainConfig, delay_s: float, name: str, box: TimeBox) -> tuple[WorkersEvidence, float]:
    """What a sweep found, and seconds of a step that is fed from memory."""
    site = rig.site
    limits = LoaderLimits(
        host=site.host,
        local_ranks=1,
        batch_bytes=4 * config.micro_batch_rows * config.seq_length_tokens,
        prefetch_batches=config.data.prefetch_batches,
        asked=rig.sizes.slow_most_workers if delay_s else None,
    )
    request = SweepRequest(
        config=with_loader(config, workers=0),
        data_dir=str(rig.data),
        limits=limits,
        window_s=rig.sizes.window_s,
        budget_s=min(rig.sizes.sweep_most_s, SWEEP_SHARE * box.left_s),
        trial_timeout_s=TRIAL_TIMEOUT_S,
        sample_delay_s=delay_s,
    )
    say(f"  {name} dataset")
    with _watched(rig) as machine:
        swept = Sweep(request=request, runner=rig.runner(box, machine))
        choice = swept.run()
    ceiling = swept.rounds[-1].get(None) or swept.rounds[0][None]
    step_s = (ceiling.window_end_s - ceiling.window_start_s) / ceiling.steps
    source = gpu_source(site, swept.every, replayed=False)
    return evidence(swept, choice, gpu_source=source, disk=None), step_s


@contextlib.contextmanager
def _watched(rig: Rig) -> Iterator[Machine]:
    """The rig's machine, with its GPU watched."""
    gpu = rig.site.gpu
    if gpu is None:
        yield rig.machine
        return
    sampler = rig.sampler([gpu.uuid])
    try:
        yield WatchedMachine(rig.machine, rig.monitor, [gpu.uuid], sampler, rig.clock)
    finally:
        sampler.stop()


def _write(sheet: Sheet, name: str, found: WorkersEvidence, chosen: WorkersRow) -> None:
    sheet.details[name] = found.model_dump(mode="json")
    sheet.measured(f"{name}_dataset_workers_count", found.chosen)
    sheet.measured(f"{name}_dataset_data_wait_share", chosen.data_wait_share)
    sheet.measured(f"{name}_dataset_windows_count", found.windows)
    use: Any = chosen.gpu
    lacking = found.gpu_source
    sheet.measured(f"{name}_dataset_gpm_sm_share", use.gpm_sm_share if use else None, lacking=lacking)
    sheet.measured(f"{name}_dataset_nvml_utilisation_share", use.utilisation_share if use else None, lacking=lacking)
