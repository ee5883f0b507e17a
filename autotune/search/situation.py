"""Put together what is known of a training: from a profile with its ledger, a run, or a directory with data."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from autotune.core.interval import CONFIDENCE, Interval
from autotune.core.profile import Profile
from autotune.core.trial import FinishedTrial
from autotune.corpus.find import find_files
from autotune.corpus.sources import SOURCES
from autotune.decide.advice import DataFacts, Foreign, Situation, Spread
from autotune.decide.bottleneck import bottleneck_of_profile, bottleneck_of_run
from autotune.decide.counters import counters_of_profile
from autotune.decide.physical import check_run
from autotune.decide.probe_command import probe_command
from autotune.errors import AutotuneError, BadInput, ProfileRefused
from autotune.measure.host import Host
from autotune.search.ledgers import read_trials
from autotune.search.profiles import StoredProfile, read_profile
from autotune.search.scaling import known_of, predict_scaling
from trainer.config import Tag, TrainConfig, tagged
from trainer.dataset import MANIFEST_NAME, read_manifest
from trainer.errors import TrainerError
from trainer.record import RUN_FILE, Run, read_run
from trainer.resolve import profile_sha256, read_profile_tables
from trainer.schema import parse_table, read_json

MOST_FOREIGN_BYTES = 2**20


def situation_of(
    place: Path,
    host: Host,
    *,
    profile: Path | None = None,
    data: Path | None = None,
    nodes: int | None = None,
    reports: Path = Path("reports"),
    candidates: Sequence[Path] = (),
) -> Situation:
    """What is known of whatever lies at a place: a profile, a run, or a directory with data.

    Args:
        place: A file is a profile.
        host: Describes the file system that the data lies on.
        profile: That a run was started from.
        data: Its directory; None looks where the profile says.
        nodes: As many as are meant, of a profile.
        reports: Where ledgers lie.
        candidates: Profiles among which that of a run is looked for, where none is named.

    Raises:
        BadInput, TrainerError: If it is nothing of these, or cannot be read.
        ProfileRefused: If the run was not started from the profile.
    """
    if place.is_file():
        found = read_profile(place)
        trials = read_trials(place, found.profile, reports).finished
        return situation_of_profile(found, trials, host, data=data, nodes=nodes)
    if (place / RUN_FILE).is_file():
        run = read_measured_run(place)
        stored = profile_of_run(run, candidates) if profile is None else read_profile(profile)
        if profile is not None and stored is not None and (others := other_than(run, stored)):
            raise ProfileRefused(
                f"{place} was not trained as {profile} says: {', '.join(others)}",
                next_step="Name the profile it was started from, or none: autotune advise RUN.",
            )
        return situation_of_run(run, host, stored=stored, data=data)
    facts = data_facts(place, host)
    if facts is None or not (facts.prepared or facts.kinds):
        raise BadInput(
            f"{place} is no profile, no run, and holds no data that could be trained on",
            next_step="Name a profile (profiles/….toml), a run (runs/…) or a directory with data.",
        )
    return Situation(train=None, data=facts)


def read_measured_run(directory: Path) -> Run:
    """Read the record of a training whose rates are taken for measurements.

    Raises:
        TrainerError: If it is no run, or one of another schema.
        MachineLacks, Undecided: If its GPU is a pretended one, or cannot reach its rates.
    """
    run = read_run(directory)
    check_run(run)
    return run


def situation_of_profile(
    stored: StoredProfile,
    trials: Sequence[FinishedTrial],
    host: Host,
    *,
    data: Path | None = None,
    nodes: int | None = None,
) -> Situation:
    """What is known after tuning.

    Args:
        stored: The profile.
        trials: Of its ledger.
        host: Describes the file system that the data lies on.
        data: Its directory; None looks where the profile says.
        nodes: As many as are meant; None takes what was measured.
    """
    profile = stored.profile
    return Situation(
        train=profile.train,
        profile=profile,
        profile_path=str(stored.path),
        intact=stored.intact,
        bottleneck=bottleneck_of_profile(profile),
        trials=tuple(trials),
        data=data_facts(data, host) if data is not None else _data_of(stored, host),
        spread=_spread(profile, nodes),
        missing=_missing(stored, nodes),
    )


def situation_of_run(
    run: Run, host: Host, *, stored: StoredProfile | None = None, data: Path | None = None
) -> Situation:
    """What is known after, or in the middle of, a run.

    Args:
        run: Its record.
        host: Describes the file system that the data lies on.
        stored: The profile that it was started from, where that is known.
        data: Its directory; None looks where the profile says.
    """
    profile = None if stored is None else stored.profile
    counters = None if profile is None else counters_of_profile(profile)
    facts = data_facts(data, host) if data is not None else None
    if facts is None and stored is not None:
        facts = _data_of(stored, host)
    return Situation(
        train=_settings_of(run),
        profile=profile,
        profile_path="PROFILE" if stored is None else str(stored.path),
        intact=stored is None or stored.intact,
        run=run,
        bottleneck=bottleneck_of_run(run, counters),
        data=facts,
    )


_OF_THE_STEP = {*tagged(TrainConfig, Tag.SPEED), "seq_length_tokens", "device"} - {"micro_batch_rows"}


def other_than(run: Run, stored: StoredProfile) -> list[str]:
    """What a run computed otherwise than its profile says, so that one's figures do not hold for the other."""
    train, settings = stored.profile.train, _settings_of(run)
    if settings is None:
        return ["settings of another version of the trainer"]
    found = [name for name in sorted(_OF_THE_STEP) if getattr(settings, name) != getattr(train, name)]
    gpu = stored.profile.fingerprint.gpu_name
    found += [f"on {run.header.device}"] if gpu is not None and run.header.device != gpu else []
    found += ["model"] if settings.model.config != train.model.config else []
    dataset = stored.profile.fingerprint.dataset_hash
    return found + (["dataset"] if dataset is not None and run.header.dataset_hash != dataset else [])


def _settings_of(run: Run) -> TrainConfig | None:
    """None where another version of the trainer wrote them, with settings that this one does not have."""
    try:
        return parse_table(TrainConfig, run.header.config, where=str(run.directory / RUN_FILE))
    except TrainerError:
        return None


def profile_of_run(run: Run, candidates: Sequence[Path]) -> StoredProfile | None:
    """The profile among these that a run was started from, as it is now; None where none says the same."""
    for path in candidates:
        try:
            if profile_sha256(read_profile_tables(path)) == run.header.profile_sha256:
                return read_profile(path)
        except (TrainerError, AutotuneError):
            continue
    return None


def data_facts(directory: Path, host: Host) -> DataFacts | None:
    """What lies in a directory; None where there is none."""
    if not directory.is_dir():
        return None
    disk = host.facts([directory]).disks[0]
    if (directory / MANIFEST_NAME).is_file():
        manifest = read_manifest(directory)
        return DataFacts(
            path=str(directory),
            prepared=True,
            kinds=tuple(manifest.source.kinds),
            raw_bytes=manifest.source.raw_bytes,
            token_bytes=manifest.source.token_bytes,
            filesystem=disk.filesystem_type,
            on_network=disk.is_network,
            vocab_size=manifest.vocab_size,
        )
    sizes = _raw_bytes(directory)
    return DataFacts(
        path=str(directory),
        prepared=False,
        kinds=tuple(sizes),
        raw_bytes=sum(sizes.values()) if sizes else None,
        filesystem=disk.filesystem_type,
        on_network=disk.is_network,
    )


def _data_of(stored: StoredProfile, host: Host) -> DataFacts | None:
    """The dataset that a profile names, where it is here."""
    directory = stored.data_here()
    return None if directory is None else data_facts(directory, host)


def read_foreign(path: Path) -> Foreign:
    """Settings of another trainer: the JSON of transformers' ``TrainingArguments``.

    Raises:
        BadInput, TrainerError: If it is none.
    """
    said = read_json(path, max_bytes=MOST_FOREIGN_BYTES)
    if not isinstance(said, dict) or not {"optim", "fp16", "bf16"} & set(said):
        raise BadInput(
            f"{path} holds no training arguments of transformers: none of optim, fp16 and bf16 is in it",
            next_step="Write them with TrainingArguments(…).to_json_string().",
        )
    optimizers: dict[str, Literal["fused", "foreach"]] = {"adamw_torch_fused": "fused", "adamw_torch": "foreach"}
    precision: Literal["fp16", "bf16", "fp32"] = "fp16" if said.get("fp16") is True else "fp32"
    return Foreign(
        source=str(path),
        precision="bf16" if said.get("bf16") is True else precision,
        optimizer=optimizers.get(str(said.get("optim"))),
    )


def with_foreign(now: Situation, path: Path | None) -> Situation:
    """The same, with the settings of another trainer."""
    return now if path is None else replace(now, foreign=read_foreign(path))


_SPECIFIC_FIRST = ("elf", "parquet", "jsonl", "text")
"""Text takes whatever reads as text, lines of JSON among it."""


def _raw_bytes(directory: Path) -> dict[str, int]:
    """Bytes of files that this project reads, by kind, the largest first; each file once."""
    found: dict[str, int] = {}
    seen: set[Path] = set()
    for kind in _SPECIFIC_FIRST:
        try:
            files = find_files(SOURCES[kind], str(directory)).files
        except AutotuneError:
            continue  # none of this kind
        found[kind] = sum(file.size_bytes for file in files if file.path not in seen)
        seen |= {file.path for file in files}
    return dict(sorted(((kind, size) for kind, size in found.items() if size), key=lambda one: -one[1]))


def _spread(profile: Profile, nodes: int | None) -> Spread | None:
    """What is predicted on as many nodes as are meant; None where links are not known, or one node is all there is."""
    network = profile.evidence.network
    if network is None or profile.evidence.probe is None:
        return None
    meant = nodes or network.nodes
    if meant == 1 or not any(link.scope == "between nodes" for link in network.links):
        return None
    known = known_of(profile, assumed=None, ranks_per_node=None, global_batch_tokens=None, sixteen_bit=False)
    name = profile.train.model.name
    scaling = predict_scaling(name, known, [meant], None)
    useful = predict_scaling(name, known, [scaling.useful_nodes], None).rows[0]
    twice = known_of(
        profile,
        assumed=None,
        ranks_per_node=None,
        global_batch_tokens=2 * scaling.global_batch_tokens,
        sixteen_bit=False,
    )
    row = scaling.rows[0]
    return Spread(
        nodes=meant,
        efficiency=Interval.of(row.efficiency, row.efficiency_low, row.efficiency_high, CONFIDENCE),
        useful_nodes=scaling.useful_nodes,
        useful_efficiency=useful.efficiency,
        tokens_per_rank=scaling.global_batch_tokens / (meant * known.network.ranks_per_node),
        least_tokens_per_rank=scaling.least_tokens_per_rank,
        twice_the_batch_efficiency=predict_scaling(name, twice, [meant], None).rows[0].efficiency,
        source="; ".join(scaling.sources),
    )


def _missing(stored: StoredProfile, nodes: int | None) -> tuple[tuple[str, str], ...]:
    evidence, path = stored.profile.evidence, shlex.quote(str(stored.path))
    found = []
    if evidence.probe is None:
        found.append(("the largest micro-batch", probe_command(stored.profile, str(stored.path))))
    if evidence.workers is None:
        found.append(("loader workers", f"autotune workers --profile {path}"))
    if evidence.network is None and evidence.probe is not None and evidence.probe.local_ranks > 1:
        found.append(("the exchange of gradients", f"autotune network --profile {path}"))
    links = evidence.network.links if evidence.network is not None else []
    if nodes is not None and nodes > 1 and not any(link.scope == "between nodes" for link in links):
        found.append(
            (f"links between nodes, and so what {nodes} would do", f"autotune network --profile {path} --slurm")
        )
    return tuple(found)
