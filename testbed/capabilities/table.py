"""The table: kinds of subjects, capabilities, and the commands that show them."""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence

from testbed.capabilities import checks
from testbed.capabilities.values import (
    PROFILE,
    Capability,
    Cell,
    DeviceName,
    Subject,
    Workplace,
)

DEVICES: tuple[DeviceName, ...] = ("cpu", "cuda")
Command = Callable[[Workplace], Sequence[str]]
RANKS_PROFILE = {strategy: f"{strategy}.toml" for strategy in ("ddp", "fsdp2")}
"""Profiles of probes with two ranks, by strategy."""
SUBJECTS = (
    Subject(
        kind="own",
        words="a plain loop",
        options=("--step", "plain_loop:build_step"),
        loader=("--loader", "plain_loop:build_loader"),
    ),
    Subject(
        kind="transformers",
        words="Hugging Face Trainer",
        options=("--subject", "transformers", "--step", "hf_trainer:make_trainer"),
    ),
    Subject(
        kind="lightning",
        words="Lightning",
        options=("--subject", "lightning", "--step", "lightning_module:make_module"),
    ),
    Subject(
        kind="accelerate",
        words="Accelerate",
        options=("--subject", "accelerate", "--step", "accelerate_parts:make_parts"),
        baseline_options=("--untuned", "micro_batch_size=8"),
    ),
    Subject(
        kind="mlm",
        words="the bundled trainer",
        options=(
            *("--model", "tiny.json", "--seq-length", "64", "--data", "data"),
            *("--global-batch-tokens", "4096"),
        ),
        probe_options=("--no-compile",),
    ),
)
_ON_GPUS_ONLY = "Accelerate shards on GPUs only"
_SENDS_OBJECTS = {
    "lightning": "its ranks send each other objects, whose bytes are values"
}


def _limits(place: Workplace, memory: str | None = None) -> tuple[str, ...]:
    """Return the options that all searches of a size share."""
    budget = ("--memory", memory or place.memory)
    return ("--device", place.device, *budget, "--trial-timeout", "60s")


def _probe(place: Workplace) -> Sequence[str]:
    subject = place.subject
    options = (*subject.options, *subject.probe_options, *_limits(place))
    contents = () if subject.is_bundled else ("--contents", "both")
    return ("probe", *options, *contents, "--out", PROFILE)


def _probe_ranks(strategy: str) -> Command:
    def command(place: Workplace) -> Sequence[str]:
        subject = place.subject
        options = (*subject.options, *subject.probe_options)
        limits = (*_limits(place, place.ranks_memory), "--max-micro-batch-size", "4")
        ranks = ("--ranks", "2", *subject.strategy(strategy))
        return ("probe", *options, *limits, *ranks, "--out", RANKS_PROFILE[strategy])

    return command


def _workers(place: Workplace, time_limit: str = "90s") -> Sequence[str]:
    # A trainer's profile has its device.
    device = () if place.subject.is_bundled else ("--device", place.device)
    limits = ("--window", "0.2s", "--max-workers", "1", "--time-limit", time_limit)
    return ("workers", PROFILE, *place.subject.loader, *device, *limits)


def _prefetch(place: Workplace) -> Sequence[str]:
    # A batch takes longer to read than the step: one worker is better than none, and
    # does not keep up either, so that the rest is searched.
    return (*_workers(place, "300s"), "--step-time", f"{checks.REPLAYED_STEP_S}s")


def _tune(place: Workplace) -> Sequence[str]:
    limits = ("--time-limit", "240s", "--window", "0.2s", "--max-micro-batch-size", "8")
    skipped = ("--skip", "baseline", "--skip", "network", "--skip", "workers")
    options = (*place.subject.options, *place.subject.loader, *_limits(place))
    return ("tune", *options, *limits, *skipped, "--out", "tuned")


def _of_profile(*words: str, options: tuple[str, ...] = ()) -> Command:
    """Return a command on the profile of the probe."""
    return lambda _: (*words, PROFILE, *options)


def _baseline(place: Workplace) -> Sequence[str]:
    limits = ("--rounds", "3", "--time-limit", "180s")
    return ("baseline", PROFILE, *place.subject.baseline_options, *limits)


def _compare(place: Workplace) -> Sequence[str]:
    shutil.copy(place.folder / PROFILE, place.folder / "copy.toml")
    return ("compare", PROFILE, "copy.toml")


def _study(place: Workplace) -> Sequence[str]:
    limits = (*_limits(place), "--max-micro-batch-size", "4")
    options = (*place.subject.options, *place.subject.probe_options, *limits)
    return ("probe", *options, "--study", "study.journal", "--out", "studied.toml")


PROBE = Capability(
    name="probe",
    words="largest micro-batch, throughput curve and knee (`probe`)",
    command=_probe,
    check=checks.check_probe,
)
PROBE_DDP = Capability(
    name="probe_ddp",
    words="several ranks with DDP (`probe --ranks`)",
    command=_probe_ranks("ddp"),
    check=lambda result: checks.check_ranks(result, "ddp", RANKS_PROFILE["ddp"]),
    not_simulated=_SENDS_OBJECTS,
)
CAPABILITIES = (
    PROBE,
    PROBE_DDP,
    Capability(
        name="probe_fsdp2",
        words="several ranks with FSDP2 (`probe --ranks`)",
        command=_probe_ranks("fsdp2"),
        check=lambda result: checks.check_ranks(
            result, "fsdp2", RANKS_PROFILE["fsdp2"]
        ),
        nowhere={
            ("transformers", "cpu"): _ON_GPUS_ONLY,
            ("accelerate", "cpu"): _ON_GPUS_ONLY,
        },
        not_simulated=_SENDS_OBJECTS,
    ),
    Capability(
        name="contents",
        words="what fills the memory (`probe`)",
        command=_of_profile("profile", "show"),
        check=checks.check_contents,
        after=PROBE,
    ),
    Capability(
        name="workers",
        words="fewest DataLoader workers (`workers`)",
        command=_workers,
        check=checks.check_workers,
        after=PROBE,
    ),
    Capability(
        name="prefetch",
        words="prefetching and pinning, if workers do not keep up (`workers`)",
        command=_prefetch,
        check=checks.check_prefetch,
        after=PROBE,
        variables={"BATCH_READ_S": str(3 * checks.REPLAYED_STEP_S)},
        # A search with interleaved windows, after the sweep.
        slow=tuple(
            (subject.kind, device) for subject in SUBJECTS for device in DEVICES
        ),
    ),
    Capability(
        name="tune",
        words="all phases, and a short training that verifies them (`tune`)",
        command=_tune,
        check=checks.check_tune,
        slow=(("mlm", "cuda"),),  # its trials compile
    ),
    Capability(
        name="advise",
        words="bottleneck and recommendations (`advise`)",
        command=_of_profile("advise"),
        check=checks.check_advise,
        after=PROBE,
        uses_the_device=False,
    ),
    Capability(
        name="compare",
        words="differences that exceed noise (`compare`)",
        command=_compare,
        check=checks.check_compare,
        after=PROBE,
        uses_the_device=False,
    ),
    Capability(
        name="report",
        words="the page (`report`)",
        command=_of_profile("report"),
        check=checks.check_report,
        after=PROBE,
        uses_the_device=False,
    ),
    Capability(
        name="plan",
        words="time, cost and memory of a run (`plan`)",
        command=_of_profile("plan", options=("--steps", "10")),
        check=checks.check_plan,
        after=PROBE,
        uses_the_device=False,
    ),
    Capability(
        name="baseline",
        words="speedup over untuned settings (`baseline`)",
        command=_baseline,
        check=checks.check_baseline,
        after=PROBE,
    ),
    Capability(
        name="network",
        words="gradient synchronisation (`network`)",
        command=lambda _: ("network", RANKS_PROFILE["ddp"], "--time-limit", "120s"),
        check=lambda result: checks.check_network(result, RANKS_PROFILE["ddp"]),
        after=PROBE_DDP,
        not_simulated=_SENDS_OBJECTS,
    ),
    Capability(
        name="verify",
        words="check against machine and trials (`profile verify`)",
        command=_of_profile("profile", "verify"),
        check=checks.check_verify,
        after=PROBE,
        uses_the_device=False,
    ),
    Capability(
        name="study",
        words="the search as an Optuna study (`probe --study`)",
        command=_study,
        check=checks.check_study,
        uses_the_device=False,
    ),
)


def cells(device: DeviceName) -> Iterator[Cell]:
    """Yield all cells that can exist on a device."""
    for row in CAPABILITIES:
        for subject in SUBJECTS:
            cell = Cell(capability=row, subject=subject, device=device)
            if cell.impossible is None:
                yield cell


def covering_sample(device: DeviceName, seed: int = 0) -> set[str]:
    """Return the names of few cells: every capability once, every kind of subject.

    As in a Latin square, each capability takes the kind that was taken least so far, in
    a shuffled order; those with the fewest kinds come first. A cell that is refused
    today is taken only if no other kind has the capability, and a slow one never; on
    pretended GPUs, nor one that does not use them.
    """
    order = list(SUBJECTS)
    random.Random(f"{device} {seed}").shuffle(order)
    taken = {subject.kind: 0 for subject in order}
    by_row: dict[str, list[Cell]] = {}
    for cell in cells(device):
        is_for_soak = device == "cuda" and not cell.capability.uses_the_device
        if not cell.is_slow and not is_for_soak:
            by_row.setdefault(cell.capability.name, []).append(cell)
    candidates = [
        [cell for cell in row if not cell.is_refused] or row for row in by_row.values()
    ]
    chosen = set()
    for row in sorted(candidates, key=len):
        kinds = sorted(order, key=lambda subject: taken[subject.kind])
        cell = min(row, key=lambda cell: kinds.index(cell.subject))
        taken[cell.subject.kind] += 1
        chosen.add(cell.name)
    return chosen


def marks(subject: Subject, row: Capability) -> str:
    """Return a cell of the page: whether a kind has a capability, and where."""
    if subject.kind in row.not_yet:
        return "no"
    missing = [name for name in DEVICES if (subject.kind, name) in row.nowhere]
    if missing == ["cpu"]:
        return "on GPUs"
    return "no" if missing else "yes"
