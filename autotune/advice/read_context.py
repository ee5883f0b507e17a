"""Context of a training for advice.

It is read from a profile with its trial log, a run, or a directory with data.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.advice.decide.bottleneck import bottleneck_of_profile, bottleneck_of_run
from autotune.advice.decide.context import DataFacts, IntendedNodes, TrainingContext
from autotune.advice.decide.gpu_counters import counters_of_profile
from autotune.advice.decide.not_judged import not_judged
from autotune.base.defaults import VOCAB_SIZE
from autotune.base.interval import CONFIDENCE, Interval
from autotune.corpus.sources import SOURCES, find_files
from autotune.errors import AutotuneError, BadInput, ProfileRejected
from autotune.evidence.advice import NotJudged
from autotune.evidence.profile import Profile
from autotune.machine.host import Host, SystemHost
from autotune.network.decide.scaling_model import Scaling
from autotune.network.scaling import joins_nodes, known_of, predict_scaling, ranks_of
from autotune.profiles.decide.follow_up import command
from autotune.profiles.recorded_trials import read_trials
from autotune.profiles.store import StoredProfile, read_profile
from autotune.speed.measure import known_rates
from autotune.subjects.mlm.memory.gains import predicted_gains
from autotune.subjects.registry import argument_names, profile_subject
from autotune.subjects.subject import Setting
from autotune.trials.decide.run_rates import check_run
from autotune.trials.values import FinishedTrial
from trainer.formats.errors import TrainerError
from trainer.formats.manifest import MANIFEST_NAME, read_manifest
from trainer.formats.model_config import attention_dropout
from trainer.formats.profile_file import profile_sha256, read_profile_tables
from trainer.formats.progress import Update
from trainer.formats.recorded_settings import settings_of
from trainer.formats.run_record import RUN_FILE, Run, read_run
from trainer.formats.train_config import Tag, TrainConfig, tagged


def context_of(
    place: Path,
    *,
    profile: Path | None,
    data: Path | None,
    nodes: int | None,
    reports: Path,
    candidates: Sequence[Path],
) -> TrainingContext:
    """Return the facts about a profile (a file), a run, or a directory with data.

    Args:
        place: The profile, run or directory.
        profile: Profile that started the run; without it, the ``candidates`` are
            searched.
        data: Dataset; without it, the profile names the dataset.
        nodes: Intended number of nodes; without it, predictions are for the nodes that
            the network was measured on.
        reports: Directory of the trial logs.
        candidates: Profiles that may have started the run.

    Raises:
        BadInput: If a path cannot be read.
        TrainerError: If the dataset or the run cannot be read.
        ProfileRejected: If the run was not started from the profile.
    """
    host = SystemHost()
    if place.is_file():
        found = read_profile(place)
        return context_of_profile(
            found,
            read_trials(place, found.profile, reports).finished,
            host,
            data=data,
            nodes=nodes,
        )
    if (place / RUN_FILE).is_file():
        run = read_measured_run(place)
        stored = (
            profile_of_run(run, candidates)
            if profile is None
            else read_profile(profile)
        )
        if (
            profile is not None
            and stored is not None
            and (others := other_settings_than(run, stored))
        ):
            what = (
                f"the settings of {place} do not match {profile}: {', '.join(others)}"
            )
            next_step = (
                "Name the profile that started the run, or leave it out:"
                f" {command('advise', place)}"
            )
            raise ProfileRejected(what, next_step=next_step)
        return context_of_run(run, host, stored=stored, data=data)
    facts = data_facts(place, host)
    if facts is None or not (facts.prepared or facts.kinds):
        what = f"'{place}' is not a profile, a run, or a directory with training data"
        raise BadInput(
            what,
            next_step=(
                "Name a profile (profiles/….toml), a run (runs/…) or a directory with"
                " data."
            ),
        )
    return TrainingContext(train=None, data=facts)


def with_predicted_gains(now: TrainingContext, update: Update) -> TrainingContext:
    """Return the context with predicted gains, if the constants of its GPU are known.

    The prediction takes about a minute.
    """
    train, gpu = now.train, now.gpu_name
    rates = None if gpu is None else known_rates(gpu)
    if train is None or train.device != "cuda" or rates is None:
        return now
    better = {
        "compile": True,
        "precision": "bf16",
        "activation_checkpointing": "none",
        "attention_dropout": 0.0,
    }
    present = {name: getattr(train, name) for name in better}
    present |= {
        "compile": train.compiled,
        "attention_dropout": attention_dropout(train),
    }
    changes = {
        name: {name: value} for name, value in better.items() if present[name] != value
    }
    vocab_size = VOCAB_SIZE if now.data is None else now.data.vocab_size or VOCAB_SIZE
    return (
        replace(
            now,
            predicted_gains=predicted_gains(train, vocab_size, rates, changes, update),
        )
        if changes
        else now
    )


def read_measured_run(directory: Path) -> Run:
    """Read the record of a run.

    Raises:
        MachineLacks: If its rates are simulated.
        Undecided: If its rates are no valid measurements.
    """
    run = read_run(directory)
    check_run(run)
    return run


def context_of_profile(
    stored: StoredProfile,
    trials: Sequence[FinishedTrial],
    host: Host,
    *,
    data: Path | None = None,
    nodes: int | None = None,
) -> TrainingContext:
    """Return the facts after tuning, with predictions for the intended nodes."""
    profile, path = stored.profile, str(stored.path)
    lacking = not_judged(profile, path)
    if nodes is not None and nodes > 1 and not joins_nodes(profile.evidence.network):
        lacking += (
            NotJudged(
                part=f"links between nodes, required to predict {nodes} nodes",
                reason="not measured",
                command=command("network", path, slurm=True),
                is_basic=True,
            ),
        )
    now = TrainingContext(
        train=profile.train_table,
        profile=profile,
        profile_path=path,
        intact=stored.intact,
        bottleneck=bottleneck_of_profile(profile),
        trials=tuple(trials),
        data=_data_of(stored, data, host),
        spread=_spread(profile, nodes),
        not_judged=lacking,
    )
    return now if profile.has_train else _with_subject(now, profile)


def _with_subject(now: TrainingContext, profile: Profile) -> TrainingContext:
    """Return the facts with what the subject says of its settings."""
    names = {profile.subject.size, *profile.settings, *_LOADER_SETTINGS}
    try:
        subject = profile_subject(profile)
    except (AutotuneError, TrainerError) as error:
        lacking = NotJudged(
            part="names of settings in your configuration",
            reason=error.message,
            remedy=error.next_step or "",
        )
        return replace(
            now,
            not_judged=(*now.not_judged, lacking),
            arguments={name: name for name in names},
        )
    untried: tuple[Setting, ...] = ()
    if profile.evidence.explore is None:
        fixed = profile.subject.arguments
        untried = tuple(
            setting for setting in subject.settings() if setting.name not in fixed
        )
    return replace(now, arguments=argument_names(subject, names), untried=untried)


def context_of_run(
    run: Run,
    host: Host,
    *,
    stored: StoredProfile | None = None,
    data: Path | None = None,
) -> TrainingContext:
    """Return the facts about a run and the profile that started it."""
    profile = None if stored is None else stored.profile
    return TrainingContext(
        train=settings_of(run.header.config),
        profile=profile,
        profile_path="PROFILE" if stored is None else str(stored.path),
        intact=stored is None or stored.intact,
        run=run,
        bottleneck=bottleneck_of_run(
            run, None if profile is None else counters_of_profile(profile)
        ),
        data=_data_of(stored, data, host),
    )


def _data_of(
    stored: StoredProfile | None, data: Path | None, host: Host
) -> DataFacts | None:
    """Return facts about the dataset.

    It is the one in the given directory, or else the profile's if that exists here.
    """
    directory = (
        data if data is not None or stored is None else stored.existing_data_dir()
    )
    return None if directory is None else data_facts(directory, host)


_LOADER_SETTINGS = ("num_workers", "prefetch_factor", "pin_memory")
"""Settings of every DataLoader."""
_OF_THE_STEP = {*tagged(TrainConfig, Tag.SPEED), "seq_length_tokens", "device"} - {
    "micro_batch_size"
}


def other_settings_than(run: Run, stored: StoredProfile) -> list[str]:
    """Return differences between a run and a profile.

    Only those count that make their figures incomparable.
    """
    settings = settings_of(run.header.config)
    if settings is None:
        return ["settings of another trainer version"]
    if not stored.profile.has_train:
        return [f"subject {stored.profile.subject.words}"]
    train = stored.profile.train
    found = [
        name
        for name in sorted(_OF_THE_STEP)
        if getattr(settings, name) != getattr(train, name)
    ]
    gpu = stored.profile.fingerprint.gpu_name
    found += (
        [f"GPU {run.header.device}"]
        if gpu is not None and run.header.device != gpu
        else []
    )
    found += ["model"] if settings.model.config != train.model.config else []
    return found + (
        ["dataset"]
        if run.header.dataset_hash != stored.profile.fingerprint.dataset_hash
        else []
    )


def profile_of_run(run: Run, candidates: Sequence[Path]) -> StoredProfile | None:
    """Return the candidate that started a run; None if no hash matches."""
    for path in candidates:
        with contextlib.suppress(TrainerError, AutotuneError):
            if profile_sha256(read_profile_tables(path)) == run.header.profile_sha256:
                return read_profile(path)
    return None


def data_facts(directory: Path, host: Host) -> DataFacts | None:
    """Return facts about the data in a directory; None if it does not exist."""
    if not directory.is_dir():
        return None
    disk = host.facts([directory]).disks[0]
    manifest = (
        read_manifest(directory) if (directory / MANIFEST_NAME).is_file() else None
    )
    sizes: dict[str, int] = {}
    seen: set[Path] = set()  # each file counts once
    # Specific kinds first: ``text`` accepts any readable text, JSON lines included.
    for kind in ("elf", "parquet", "jsonl", "text") if manifest is None else ():
        with contextlib.suppress(AutotuneError):  # no such files
            files = find_files(SOURCES[kind], str(directory)).files
            sizes[kind] = sum(
                file.size_bytes for file in files if file.path not in seen
            )
            seen |= {file.path for file in files}
    sizes = dict(
        sorted(
            ((kind, size) for kind, size in sizes.items() if size),
            key=lambda one: -one[1],
        )
    )
    return DataFacts(
        path=str(directory),
        prepared=manifest is not None,
        kinds=tuple(sizes if manifest is None else manifest.source.kinds),
        raw_bytes=(
            (sum(sizes.values()) if sizes else None)
            if manifest is None
            else manifest.source.raw_bytes
        ),
        token_bytes=None if manifest is None else manifest.source.token_bytes,
        filesystem=disk.filesystem_type,
        on_network=disk.is_network,
        vocab_size=None if manifest is None else manifest.vocab_size,
    )


def _spread(profile: Profile, nodes: int | None) -> IntendedNodes | None:
    """Return the prediction for the intended nodes.

    Returns:
        The prediction, or None for a single node, or without a probe or known links.
    """
    network = profile.evidence.network
    meant = nodes or (1 if network is None else network.nodes)
    if profile.evidence.probe is None or meant == 1 or not joins_nodes(network):
        return None
    if not profile.has_train:
        return None  # autotune plan predicts it, from what the subject tells

    def predicted(counts: list[int], batch_tokens: int | None = None) -> Scaling:
        return predict_scaling(
            profile.train.model.name,
            known_of(profile, global_batch_tokens=batch_tokens),
            counts,
        )

    scaling = predicted([meant])
    row, batch_tokens = scaling.rows[0], scaling.global_batch_tokens
    return IntendedNodes(
        nodes=meant,
        efficiency=Interval.from_bounds(
            row.efficiency, row.efficiency_low, row.efficiency_high, CONFIDENCE
        ),
        useful_nodes=scaling.useful_nodes,
        useful_efficiency=predicted([scaling.useful_nodes]).rows[0].efficiency,
        tokens_per_rank=batch_tokens / (meant * ranks_of(profile)),
        least_tokens_per_rank=scaling.least_tokens_per_rank,
        twice_the_batch_efficiency=predicted([meant], 2 * batch_tokens)
        .rows[0]
        .efficiency,
        source="; ".join(scaling.sources),
    )
