"""Capabilities of autotune for each kind of subject, as one table.

Tests run every cell of it, on a CPU and on a pretended GPU, and ``docs/your-code.md``
shows it. A new capability is one more row of ``CAPABILITIES``.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from autotune.evidence.peak_contents import ContentKind, PeakContents
from testbed.datasets import write_dataset
from testbed.nullgpu.machine import MEASURING

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "examples/programs"
"""One small program for each kind of subject."""
PROFILE = "profile.toml"
RANKS_PROFILE = "ranks.toml"
PARAMETER_BYTES = 4 * (4 * (64 * 64 + 64) + 64 * 10 + 10)
"""Parameters of ``small_training.Network`` in fp32."""
SHARDED_SHARE = 0.75
"""Share of the parameters below which a rank has a shard of them: half, and padding."""
REFUSALS = (2, 7)
"""Exit codes of a command that does not serve a subject: wrong usage, not checkable."""
DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A kind of subject, and the options that name a small program of that kind."""

    kind: str
    words: str
    options: tuple[str, ...]
    """Options of ``probe`` and ``tune``."""
    loader: tuple[str, ...] = ()
    """Options of ``workers`` that name the loader, if the program has two functions."""

    @property
    def has_network(self) -> bool:
        """True if the program trains ``small_training.Network``."""
        return self.kind != "mlm"

    def strategy(self, name: str) -> tuple[str, ...]:
        """Return the options of ``probe`` that choose a parallel strategy."""
        if self.has_network:
            return ("--set", f"strategy={name}")
        return ("--strategy", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class Run(Protocol):
    """Function that runs ``autotune`` on a machine."""

    def __call__(self, words: Sequence[str], variables: Mapping[str, str]) -> Answer:
        """Run a command in the folder of the programs.

        Args:
            words: Command and its options.
            variables: Environment variables, in addition to the machine's.
        """


class Refused(Exception):
    """A command does not serve a subject."""


class Failed(Exception):
    """A command ended with another error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """The folder of a subject's program, and a machine that runs commands there."""

    subject: Subject
    device: DeviceName
    memory: str
    folder: Path
    run: Run
    ended: dict[str, "Result"] = field(default_factory=dict)
    """Results of capabilities that others build on, by name."""

    def prepare(self) -> None:
        """Write the programs, and the model and the dataset of the bundled trainer."""
        for program in PROGRAMS.glob("*.py"):
            shutil.copy(program, self.folder)
        (self.folder / "tiny.json").write_text(json.dumps(TINY_MODEL))
        lengths = random.Random(0)
        samples = [
            [lengths.randrange(5, 128) for _ in range(lengths.randrange(8, 60))]
            for _ in range(400)
        ]
        write_dataset(self.folder / "data", samples, vocab_size=128)

    def table(self, name: str = PROFILE) -> dict[str, Any]:
        """Return a profile that a command has written."""
        return tomllib.loads((self.folder / name).read_text())

    def result_of(self, name: str) -> "Result":
        """Return the result of a capability that another one builds on."""
        if name not in self.ended:
            self.ended[name] = run_capability(capability(name), self)
        return self.ended[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the command of a capability printed, and where it ran."""

    answer: dict[str, Any]
    place: Workplace

    @property
    def table(self) -> dict[str, Any]:
        """The profile as it is now."""
        return self.place.table()

    @property
    def evidence(self) -> dict[str, Any]:
        """The evidence of the profile."""
        evidence: dict[str, Any] = self.table["evidence"]
        return evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A row of the table: a command, and what its answer must have."""

    name: str
    words: str
    """The capability in words, for the page."""
    command: Callable[[Workplace], Sequence[str]]
    check: Callable[[Result], None]
    after: str | None = None
    """Capability whose profile it reads."""
    variables: Mapping[str, str] = field(default_factory=dict)
    not_yet: tuple[str, ...] = ()
    """Kinds of subjects for which the command exits with an error today."""
    nowhere: Mapping[tuple[str, DeviceName], str] = field(default_factory=dict)
    """Why a kind cannot have it on a device: a limit of its library."""


TINY_MODEL = {
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
SUBJECTS = (
    Subject(
        kind="own",
        words="a plain loop",
        options=("--step", "plain_loop:build_step"),
        loader=("--loader", "plain_loop:build_loader"),
    ),
    Subject(
        kind="transformers",
        words="Trainer of transformers",
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
    ),
    Subject(
        kind="mlm",
        words="the bundled trainer",
        options=(
            *("--model", "tiny.json", "--seq-length", "64", "--data", "data"),
            *("--global-batch-tokens", "4096", "--no-compile"),
        ),
    ),
)
OTHERS = ("own", "transformers", "lightning", "accelerate")
"""Kinds of code that is not the bundled trainer's."""
_ON_GPUS_ONLY = "Accelerate shards on GPUs only"


def _limits(place: Workplace) -> tuple[str, ...]:
    """Return the options that all searches of a size share."""
    return (
        *("--device", place.device, "--memory", place.memory),
        *("--trial-timeout", "60s"),
    )


def _probe(place: Workplace) -> Sequence[str]:
    contents = ("--contents", "both") if place.subject.has_network else ()
    options = (*place.subject.options, *_limits(place), *contents)
    return ("probe", *options, "--out", PROFILE)


def _check_probe(result: Result) -> None:
    table, probe = result.table, result.evidence["probe"]
    assert probe["infeasible_min"] == probe["feasible_max"] + 1
    assert not probe["is_lower_bound"]
    assert probe["feasible_peak_bytes"] <= table["constraints"]["memory_budget_bytes"]
    curve = {row["micro_batch_size"]: row for row in probe["curve"]}
    assert len(curve) > 1
    assert list(curve) == sorted(curve)
    assert max(curve) <= probe["feasible_max"]
    for size, row in curve.items():
        tokens = size * table["subject"]["units_per_size"]
        rate = tokens / row["step_s"]
        assert 0.5 * rate < row["padded_tokens_per_s"] < 2 * rate
    assert set(probe["knee_micro_batch_sizes"]) <= set(curve)
    settings = table["settings"] if result.place.subject.has_network else table["train"]
    assert settings["micro_batch_size"] in curve
    assert probe["choice"]
    printed = result.answer.get("steps") or result.answer["models"]
    [step] = printed
    printed_probe = step["evidence"]["probe"] if "evidence" in step else step
    assert printed_probe["feasible_max"] == probe["feasible_max"]
    assert table["fingerprint"]["device"] == result.place.device


def _probe_ranks(strategy: str) -> Callable[[Workplace], Sequence[str]]:
    def command(place: Workplace) -> Sequence[str]:
        options = (*place.subject.options, *place.subject.strategy(strategy))
        limits = (*_limits(place), "--ranks", "2", "--max-micro-batch-size", "4")
        return ("probe", *options, *limits, "--out", f"{strategy}-{RANKS_PROFILE}")

    return command


def _check_ranks(strategy: str) -> Callable[[Result], None]:
    def check(result: Result) -> None:
        table = result.place.table(f"{strategy}-{RANKS_PROFILE}")
        probe = table["evidence"]["probe"]
        assert probe["local_ranks"] == 2
        assert probe["feasible_max"] == 4
        assert probe["optimizer_steps"] >= 2
        if not result.place.subject.has_network:
            assert table["train"]["parallel"]["strategy"] == strategy
            return
        assert table["subject"]["table"]["arguments"] == {"strategy": strategy}
        contents = PeakContents.model_validate(probe["contents"])
        parameter_bytes = contents.bytes_by_kind[ContentKind.PARAMETERS]
        is_sharded = parameter_bytes < SHARDED_SHARE * PARAMETER_BYTES
        assert is_sharded == (strategy == "fsdp2"), parameter_bytes

    return check


def _show(place: Workplace) -> Sequence[str]:
    return ("profile", "show", PROFILE)


def _check_contents(result: Result) -> None:
    probe = result.evidence["probe"]
    if not result.place.subject.has_network:
        assert sum(probe["traced_terms_bytes"].values()) == probe["traced_peak_bytes"]
        assert probe["traced_terms_bytes"]["parameters"] >= 4 * probe["parameters"]
        return
    contents = PeakContents.model_validate(probe["contents"])
    assert contents.not_attributed_bytes == contents.missed_releases_bytes == 0
    assert contents.peak_bytes <= probe["feasible_peak_bytes"]
    kinds = contents.bytes_by_kind
    assert kinds[ContentKind.PARAMETERS] >= PARAMETER_BYTES
    assert kinds[ContentKind.OPTIMIZER_STATE] >= 2 * PARAMETER_BYTES
    refused = PeakContents.model_validate(probe["refused_contents"])
    assert refused.refused is not None
    shown = result.answer["evidence"]["probe"]["contents"]
    assert shown["peak_bytes"] == contents.peak_bytes


def _workers(place: Workplace) -> Sequence[str]:
    return (
        *("workers", PROFILE, *place.subject.loader, *_device_of_own(place)),
        *("--window", "0.2s", "--max-workers", "1", "--time-limit", "40s"),
    )


def _device_of_own(place: Workplace) -> tuple[str, ...]:
    """Return the option that chooses the device, which a trainer's profile has."""
    return ("--device", place.device) if place.subject.has_network else ()


def _check_workers(result: Result) -> None:
    workers = result.evidence["workers"]
    counts = [row["num_workers"] for row in workers["rows"]]
    assert set(counts) <= {0, 1}
    assert workers["chosen"] in counts
    assert all(rate > 0 for rate in workers["cached_units_per_s"])
    for row in workers["rows"]:
        assert row["ratio_low"] <= row["ratio_to_cached"] <= row["ratio_high"]
        assert all(rate > 0 for rate in row["units_per_s"])
    assert workers["unit"]
    assert _loader_settings(result)["num_workers"] == workers["chosen"]


def _loader_settings(result: Result) -> dict[str, Any]:
    """Return the settings of the loader that a profile has."""
    table = result.table
    settings: dict[str, Any] = table["settings"]
    if not result.place.subject.has_network:
        settings = table["train"]["data"]
    return settings


def _prefetch(place: Workplace) -> Sequence[str]:
    # No number of workers keeps up with so short a step, so that the rest is searched.
    return (*_workers(place), "--step-time", "1ms")


def _check_prefetch(result: Result) -> None:
    workers = result.evidence["workers"]
    assert workers["replayed_step_s"] == 0.001
    assert not workers["keeps_up"]
    joint = workers["joint"]
    assert joint["trials"] > 1
    searched = {"prefetch_factor", "pin_memory"} & set(joint)
    assert searched
    if joint["adopted"]:
        settings = _loader_settings(result)
        assert all(settings[name] == joint[name] for name in searched)


def _tune(place: Workplace) -> Sequence[str]:
    limits = ("--time-limit", "150s", "--window", "0.2s")
    skipped = ("--skip", "baseline", "--skip", "network", "--skip", "workers")
    options = (*place.subject.options, *_limits(place), *limits, *skipped)
    return ("tune", *options, "--max-micro-batch-size", "16", "--out", "tuned")


def _check_tune(result: Result) -> None:
    statuses = {stage["name"]: stage["status"] for stage in result.answer["stages"]}
    assert statuses["probe"] == statuses["confirm"] == statuses["report"] == "done"
    assert (result.place.folder / result.answer["report"]).is_file()
    [path] = result.answer["profiles"]
    table = result.place.table(path)
    confirm = table["evidence"]["confirm"]
    low, high = confirm["promised_low"], confirm["promised_high"]
    assert 0 < low <= confirm["promised_tokens_per_s"] <= high
    # The training either delivered a rate, or says why there is none.
    assert ("delivered" in confirm) != ("not_delivered" in confirm)


def _of_profile(
    *words: str, options: tuple[str, ...] = ()
) -> Callable[[Workplace], Sequence[str]]:
    """Return a command on the profile of the probe."""
    return lambda _: (*words, PROFILE, *options)


def _check_advise(result: Result) -> None:
    assert result.answer["advice"]
    for advice in result.answer["advice"]:
        assert advice["claim"]
        assert advice["would_change"]
        for figure in advice["evidence"]:
            assert figure["unit"]
            assert figure["source"]
    rules = {advice["rule"] for advice in result.answer["advice"]}
    assert "not-measured" in rules  # of what only the probe has measured


def _compare(place: Workplace) -> Sequence[str]:
    shutil.copy(place.folder / PROFILE, place.folder / "copy.toml")
    return ("compare", PROFILE, "copy.toml")


def _check_compare(result: Result) -> None:
    [comparison] = result.answer["comparisons"]
    assert comparison["settings"] == comparison["circumstances"] == []
    measured = comparison["a"]["measurements"]
    assert {"peak memory"} < {one["metric"]["name"] for one in measured}
    assert all(one["metric"]["unit"] for one in measured)
    assert all(one["estimate"]["value"] > 0 for one in measured)


def _check_report(result: Result) -> None:
    folder = result.place.folder
    probe, words = result.evidence["probe"], result.table["subject"]["words"]
    page = (folder / result.answer["html"]).read_text()
    assert words in page
    assert (
        f"{probe['feasible_max']}" in (folder / result.answer["markdown"]).read_text()
    )
    [profile] = json.loads((folder / result.answer["json"]).read_text())["profiles"]
    assert profile["path"] == PROFILE


def _check_plan(result: Result) -> None:
    assert result.answer["steps"]["value"] == 10
    assert result.answer["steps"]["basis"] == "given"
    assert result.answer["wall_s"]["value"] > 0
    assert result.answer["wall_s"]["basis"] in ("measured", "predicted")


def _check_baseline(result: Result) -> None:
    baseline = result.evidence["baseline"]
    names = [row["name"] for row in baseline["rows"]]
    assert "tuned" in names
    assert len(names) > 1
    assert all(rate > 0 for row in baseline["rows"] for rate in row["tokens_per_s"])


def _network(place: Workplace) -> Sequence[str]:
    return ("network", f"ddp-{RANKS_PROFILE}", "--time-limit", "60s")


def _check_network(result: Result) -> None:
    table = result.place.table(f"ddp-{RANKS_PROFILE}")
    network = table["evidence"]["network"]
    assert network["nodes"] * network["ranks_per_node"] == 2
    assert [link["members"] for link in network["links"]] == [2]
    assert any(row.get("step_s") for row in network["gradient_syncs"])


def _check_verify(result: Result) -> None:
    assert result.answer["intact"]
    assert result.answer["trial_log"]["trials"] > 1
    assert not result.answer["trial_log"]["unfounded"]
    differing = [
        check["field"]
        for check in result.answer["checks"]
        if check["found"] == "refuse"
    ]
    assert not differing


def _study(place: Workplace) -> Sequence[str]:
    limits = (*_limits(place), "--max-micro-batch-size", "4")
    options = (*place.subject.options, *limits, "--study", "study.journal")
    return ("probe", *options, "--out", "studied.toml")


def _check_study(result: Result) -> None:
    import optuna

    path = str(result.place.folder / "study.journal")
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(path)
    )
    [study] = optuna.get_all_study_summaries(storage)
    assert study.n_trials > 1


CAPABILITIES = (
    Capability(
        name="probe",
        words="largest micro-batch, throughput curve and knee (`probe`)",
        command=_probe,
        check=_check_probe,
    ),
    Capability(
        name="probe_ddp",
        words="two ranks with DDP (`probe --ranks 2`)",
        command=_probe_ranks("ddp"),
        check=_check_ranks("ddp"),
    ),
    Capability(
        name="probe_fsdp2",
        words="two ranks with FSDP2 (`probe --ranks 2`)",
        command=_probe_ranks("fsdp2"),
        check=_check_ranks("fsdp2"),
        nowhere={
            ("transformers", "cpu"): _ON_GPUS_ONLY,
            ("accelerate", "cpu"): _ON_GPUS_ONLY,
        },
    ),
    Capability(
        name="contents",
        words="what fills the memory (`probe`)",
        command=_show,
        check=_check_contents,
        after="probe",
    ),
    Capability(
        name="workers",
        words="fewest DataLoader workers (`workers`)",
        command=_workers,
        check=_check_workers,
        after="probe",
    ),
    Capability(
        name="prefetch",
        words="prefetching and pinning, if workers do not keep up (`workers`)",
        command=_prefetch,
        check=_check_prefetch,
        after="probe",
        variables={"SAMPLE_READ_S": "0.005"},
    ),
    Capability(
        name="tune",
        words="all phases, and a short training that verifies them (`tune`)",
        command=_tune,
        check=_check_tune,
        not_yet=OTHERS,
    ),
    Capability(
        name="advise",
        words="bottleneck and recommendations (`advise`)",
        command=_of_profile("advise"),
        check=_check_advise,
        after="probe",
        not_yet=OTHERS,
    ),
    Capability(
        name="compare",
        words="differences that exceed noise (`compare`)",
        command=_compare,
        check=_check_compare,
        after="probe",
    ),
    Capability(
        name="report",
        words="the page (`report`)",
        command=_of_profile("report"),
        check=_check_report,
        after="probe",
    ),
    Capability(
        name="plan",
        words="time, cost and memory of a run (`plan`)",
        command=_of_profile("plan", options=("--steps", "10")),
        check=_check_plan,
        after="probe",
        not_yet=OTHERS,
    ),
    Capability(
        name="baseline",
        words="speedup over untuned settings (`baseline`)",
        command=_of_profile(
            "baseline", options=("--rounds", "3", "--time-limit", "120s")
        ),
        check=_check_baseline,
        after="probe",
        not_yet=OTHERS,
    ),
    Capability(
        name="network",
        words="gradient synchronisation (`network`)",
        command=_network,
        check=_check_network,
        after="probe_ddp",
        not_yet=OTHERS,
    ),
    Capability(
        name="verify",
        words="check of a profile against machine and trials (`profile verify`)",
        command=_of_profile("profile", "verify"),
        check=_check_verify,
        after="probe",
    ),
    Capability(
        name="study",
        words="the search as an Optuna study (`probe --study`)",
        command=_study,
        check=_check_study,
        not_yet=(*OTHERS, "mlm"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A capability of a kind of subject on a device."""

    capability: Capability
    subject: Subject
    device: DeviceName

    @property
    def name(self) -> str:
        """Name as tests have it: ``probe[own]``."""
        return f"{self.capability.name}[{self.subject.kind}]"

    @property
    def impossible(self) -> str | None:
        """Why there is no such cell; None if there is."""
        return self.capability.nowhere.get((self.subject.kind, self.device))

    @property
    def is_refused(self) -> bool:
        """True if the command exits with an error for this kind today."""
        return self.subject.kind in self.capability.not_yet


def capability(name: str) -> Capability:
    """Return the row of a name."""
    [found] = [row for row in CAPABILITIES if row.name == name]
    return found


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
    a shuffled order; those with the fewest kinds come first. A cell whose command is
    refused today is taken only if no other kind has the capability.
    """
    order = list(SUBJECTS)
    random.Random(f"{device} {seed}").shuffle(order)
    taken = {subject.kind: 0 for subject in order}
    by_row: dict[str, list[Cell]] = {}
    for cell in cells(device):
        by_row.setdefault(cell.capability.name, []).append(cell)
    candidates = [
        [cell for cell in row if not cell.is_refused] or row for row in by_row.values()
    ]
    chosen = set()
    for row in sorted(candidates, key=len):
        kinds = sorted(order, key=lambda subject: taken[subject.kind])
        row.sort(key=lambda cell: kinds.index(cell.subject))
        taken[row[0].subject.kind] += 1
        chosen.add(row[0].name)
    return chosen


def run_capability(row: Capability, place: Workplace) -> Result:
    """Run the command of a capability on a subject, after the one that it builds on.

    Raises:
        Refused: If the command does not serve the subject.
        Failed: If it ends with another error.
    """
    if row.after is not None:
        place.result_of(row.after)
    words = (*row.command(place), "--json")
    answer = place.run(words, row.variables)
    if answer.code:
        error = Refused if answer.code in REFUSALS else Failed
        raise error(
            f"{' '.join(words)}: exit code {answer.code}\n{answer.out[-2000:]}\n"
            f"{answer.err[-4000:]}"
        )
    return Result(answer=json.loads(answer.out), place=place)


def run_on_cpu(
    folder: Path, words: Sequence[str], variables: Mapping[str, str]
) -> Answer:
    """Run ``autotune`` on this machine's CPU, in a folder."""
    here = ("--here",) if words[0] in MEASURING else ()
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", *words, *here],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    return Answer(code=ended.returncode, out=ended.stdout, err=ended.stderr)
