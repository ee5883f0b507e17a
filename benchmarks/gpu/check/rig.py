"""What all stages of the GPU check work with: the machine, its GPU, the sizes, and the time that is left."""

import contextlib
import dataclasses
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autotune.core.outcome import Measured, Outcome, describe
from autotune.core.trial import Trial
from autotune.measure.clock import Clock
from autotune.measure.gpu_sampler import GpuSampler, Sampler
from autotune.measure.machine import ForkServerMachine, Machine
from autotune.measure.nvml import GpuMonitor
from autotune.search.probe import Search
from autotune.search.site import Site, fingerprint
from autotune.search.trials import TrialRunner, made_on
from autotune.store import Ledger, write_atomically
from benchmarks.gpu.check.children import Ended, Programs
from benchmarks.gpu.check.made_with import made_with
from benchmarks.gpu.check.results import NO_TIME, Sheet, StageResult
from benchmarks.gpu.check.sizes import Sizes
from benchmarks.gpu.check.watch import Watch
from tests.simulators.corpora import real_lengths, write_learnable_corpus
from trainer.config import ModelSettings
from trainer.dataset import Manifest
from trainer.presets import model_settings
from trainer.schema import canonical_sha256

LEDGER_NAME = "ledger.jsonl"
SHORTEST_TRIAL_S = 2.0
"""Less than this is not worth starting a process for."""


class NoTimeLeft(Exception):
    """A stage has used up its time."""


class TrialFailed(Exception):
    """What the stage cannot do without did not measure."""


class TrialServer(Machine, Protocol):
    """A machine that can be started ahead of its first trial, and then knows its libraries."""

    versions: dict[str, str | None]

    def start(self) -> None:
        """Start; returns at once if it runs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBox:
    """The time that a stage, or a part of one, may take."""

    clock: Clock
    end_s: float

    @property
    def left_s(self) -> float:
        """Seconds that are left, 0 at least."""
        return max(0.0, self.end_s - self.clock.monotonic_s())

    def part(self, share: float) -> "TimeBox":
        """A box that holds a share of what is left."""
        return dataclasses.replace(self, end_s=self.clock.monotonic_s() + share * self.left_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxedMachine:
    """A machine whose trials end with a time box, whatever limit of their own they have."""

    machine: Machine
    box: TimeBox
    closed: Callable[[], bool]
    """Whether the check has ended meanwhile, so that nothing may be started any more."""

    def run(self, trial: Trial) -> Outcome:
        """Run a trial within the box.

        Raises:
            NoTimeLeft: If there is no time for it, or if the end of the box cut it off.
        """
        if self.closed():
            raise NoTimeLeft("the check has ended")
        left_s = self.box.left_s
        if left_s < SHORTEST_TRIAL_S:
            raise NoTimeLeft(NO_TIME)
        outcome = self.machine.run(dataclasses.replace(trial, timeout_s=min(trial.timeout_s, left_s)))
        if outcome.kind == "timed_out" and left_s < trial.timeout_s:
            raise NoTimeLeft(f"{NO_TIME}: a trial was cut off after {left_s:.0f} s")
        return outcome

    def close(self) -> None:
        """The machine belongs to the rig."""


class Rig:
    """The machine under test.

    Args:
        site: What is measured.
        monitor: Its GPUs.
        make_machine: Gives a machine for trials; asked again after one that hangs.
        make_sampler: Gives what samples GPUs, with windows of counters of so many seconds.
        manifest: Vocabulary and special tokens.
        sizes: How much of everything.
        clock: The time.
        out: Where the files go.
        scratch: A private directory; trials of an earlier check are not in it, so every figure is measured anew.
        data: A prepared dataset; None makes one, of real lengths and ids that mean nothing.
        nproc: Ranks that step together in the stage of several.
    """

    def __init__(
        self,
        *,
        site: Site,
        monitor: GpuMonitor,
        make_machine: Callable[[], TrialServer],
        make_sampler: Callable[[Sequence[str], float], Sampler],
        manifest: Manifest,
        sizes: Sizes,
        clock: Clock,
        out: Path,
        scratch: Path,
        data: Path | None = None,
        nproc: int = 1,
    ) -> None:
        self.site = site
        self.monitor = monitor
        self.manifest = manifest
        self.sizes = sizes
        self.clock = clock
        self._make_machine = make_machine
        self._make_sampler = make_sampler
        self.machine = make_machine()
        self._ledger = Ledger(scratch, "check")
        self._earlier_trials = ""
        self._closed = False
        self.scratch = scratch
        self.out = out
        self.nproc = nproc
        self._data = data
        self._data_lock = threading.Lock()
        self.programs = Programs(scratch)
        self.largest: Search | None = None
        """The search for the largest micro-batch that the long run trains at, once there was one."""
        self.unfinished: Mapping[str, StageResult] = {}
        """Stages that an earlier check in the same directory did not end, by name: some go on from there."""
        self.made_with = made_with(site, manifest)
        """What figures depend on beside the device."""

    @property
    def settings(self) -> ModelSettings:
        """The model that is probed and trained."""
        return model_settings(self.sizes.model)

    @property
    def data(self) -> Path:
        """The dataset that is trained on; made when it is first asked for."""
        with self._data_lock:
            if self._data is None:
                lengths = real_lengths(self.sizes.samples, seed=0), real_lengths(self.sizes.validation_samples, seed=1)
                partial = self.scratch / "data.partial"
                shutil.rmtree(partial, ignore_errors=True)
                write_learnable_corpus(partial, *lengths, vocab_size=self.sizes.vocab_size)
                self._data = partial.rename(self.scratch / "data")
            return self._data

    @property
    def watched_uuid(self) -> str | None:
        """The GPU to watch; None where the check runs on a CPU."""
        return self.site.gpu.uuid if self.site.gpu else None

    @property
    def unwatched_reason(self) -> str:
        """Why there is no GPU to watch."""
        return self.site.gpu_absent or "the check runs on the CPU"

    def watch(self) -> Watch:
        """What watches the GPU, where there is one."""
        uuid = self.watched_uuid
        return Watch(self.sampler([] if uuid is None else [uuid]), uuid, self.unwatched_reason)

    def sampler(self, uuids: Sequence[str]) -> Sampler:
        """What samples GPUs."""
        return self._make_sampler(uuids, self.sizes.gpm_window_s)

    def runner(self, box: TimeBox, machine: Machine | None = None) -> TrialRunner:
        """Runs trials within a time box, keeps them in the ledger and says so on standard error.

        Args:
            box: The time.
            machine: Where they run; None takes the rig's own.
        """

        def on_trial(label: str, outcome: Outcome | None) -> None:
            if outcome is not None:
                say(f"  {label}: {describe(outcome) if not isinstance(outcome, Measured) else 'measured'}")
                self._publish_ledger()

        if machine is None:
            self.machine.start()  # before the first trial's time is counted
        here = fingerprint(self.site, self.settings, self.manifest, self.machine.versions.get("cuda"))
        return TrialRunner(
            machine=BoxedMachine(machine=machine or self.machine, box=box, closed=lambda: self._closed),
            ledger=self._ledger,
            site=canonical_sha256(here.model_dump(mode="json"))[:16],
            clock=self.clock,
            on_trial=on_trial,
            made_on=made_on(here),
        )

    def figures(self, trial: Trial, label: str, box: TimeBox) -> dict[str, Any]:
        """Run a trial that must measure, and give its figures.

        Raises:
            TrialFailed: If it did not.
            NoTimeLeft: If there is no time for it.
        """
        outcome = self.runner(box).run(trial, label)
        if isinstance(outcome, Measured):
            return outcome.figures
        raise TrialFailed(f"the trial {label!r} {describe(outcome)}: {outcome.detail}")

    def program(
        self, module: str, arguments: Sequence[str], box: TimeBox, *, known: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], Ended]:
        """Run a program of this checkout that takes the device for itself and writes what it finds to ``--json FILE``.

        Args:
            module: The program.
            arguments: Its own.
            box: The time.
            known: What it had found when it was cut off another time, to go on from there.

        Returns:
            What it had written when it ended, empty if nothing; and how it ended.
        """
        found = self.scratch / f"{module}.json"
        found.unlink(missing_ok=True)
        words = ["-m", module, *arguments, "--json", str(found)]
        if known:
            write_atomically(found, json.dumps(known))
            words.append("--go-on")
        ended = self.programs.run(words, box.left_s, lambda line: say(f"  {line}"))
        return (json.loads(found.read_text()) if found.is_file() else {}), ended

    def go_on(self, stage: str, sheet: Sheet) -> StageResult | None:
        """What an earlier check had of a stage that it did not end, and the sheet says from when it is.

        None where there was none, or where it was made with another version of something that figures depend on.
        """
        earlier = self.unfinished.get(stage)
        if earlier is None or earlier.made_with != self.made_with:
            return None
        sheet.details["gone_on_from_utc"] = [*earlier.details.get("gone_on_from_utc", ()), earlier.measured_utc]
        return earlier

    def keep_trials(self) -> None:
        """Keep an earlier check's trials in the ledger, as its figures are kept."""
        ledger = self.out / LEDGER_NAME
        self._earlier_trials = ledger.read_text(encoding="utf-8") if ledger.is_file() else ""

    def another_machine(self) -> TrialServer:
        """A second one, for what needs no device; whoever asks for it closes it."""
        return self._make_machine()

    def replace_machine(self) -> None:
        """Give up a machine that hangs; its processes are killed."""
        hung, self.machine = self.machine, self._make_machine()
        hung.close()

    def close(self) -> None:
        """End whatever runs, and start nothing any more."""
        self._closed = True
        self.programs.close()
        self.machine.close()
        self.monitor.close()

    def _publish_ledger(self) -> None:
        lines = [path.read_text(encoding="utf-8") for path in sorted(self.scratch.glob("*.jsonl"))]
        write_atomically(self.out / LEDGER_NAME, "".join([self._earlier_trials, *lines]))


@contextlib.contextmanager
def open_rig(
    *,
    site: Site,
    monitor: GpuMonitor,
    manifest: Manifest,
    sizes: Sizes,
    clock: Clock,
    out: Path,
    data: Path | None = None,
    nproc: int = 1,
) -> Iterator[Rig]:
    """A rig on this very machine, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        rig = Rig(
            site=site,
            monitor=monitor,
            make_machine=ForkServerMachine,
            make_sampler=lambda uuids, gpm_window_s: GpuSampler(uuids, gpm_window_s=gpm_window_s),
            manifest=manifest,
            sizes=sizes,
            clock=clock,
            out=out,
            scratch=Path(scratch),
            data=data,
            nproc=nproc,
        )
        try:
            yield rig
        finally:
            rig.close()


def check_end(ended: Ended, accepted: Sequence[int] = (0,)) -> None:
    """Say what a program did not come to.

    Args:
        ended: How it ended.
        accepted: Exit codes of good ends.

    Raises:
        NoTimeLeft: If it was cut off.
        TrialFailed: If it failed.
    """
    if ended.cut_off:
        raise NoTimeLeft(ended.why)
    if ended.exit_code not in accepted:
        raise TrialFailed(ended.why)


def say(line: str) -> None:
    """Progress, on standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
