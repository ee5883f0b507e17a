"""A dataset on the node's own disk: one rank of a node copies it, the others wait. No torch here.

A copy is hashed while it is made, synced, and renamed: what has its name is whole. Reading during training is random,
so what staging is worth is measured by reading random samples on both sides.
"""

import os
import string
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.attempt import Attempt, Standing, job_key
from trainer.copying import CopyFigures, copy_files, dataset_files, seconds_per_sample
from trainer.dataset import read_manifest
from trainer.errors import BadConfig
from trainer.place import Place, writing
from trainer.progress import Update
from trainer.resolve import ResolvedConfig

DEFAULT_TIMEOUT_S = 3600.0
_POLL_S = 0.1
_GRACE_S = 5.0
"""The leader may wait as long for another job as the others for the leader: its error is to come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A dataset on a local disk.

    Args:
        directory: Where it is.
        dataset_hash: What it is.
        samples: Of the training split.
        copied: What the copy took; None when it was there already, or another rank copied it.
        source_s_per_sample: Mean time of reading one random sample from the source, measured by one reader; None
            where nothing was copied.
        local_s_per_sample: The same from the copy.
    """

    directory: Path
    dataset_hash: str
    samples: int
    copied: CopyFigures | None = None
    source_s_per_sample: float | None = None
    local_s_per_sample: float | None = None

    @property
    def break_even_epochs(self) -> float | None:
        """Epochs of reading after which the copy has paid for itself; None if never, or where nothing was measured."""
        if self.copied is None or self.source_s_per_sample is None or self.local_s_per_sample is None:
            return None
        saved_s_per_epoch = self.samples * (self.source_s_per_sample - self.local_s_per_sample)
        return self.copied.seconds / saved_s_per_epoch if saved_s_per_epoch > 0 else None


def local_rank_of(environment: Mapping[str, str] = os.environ) -> int:
    """This process among those of its node, as torchrun or SLURM say; 0 alone."""
    return int(environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or 0)


def stage(
    source: Path,
    local: Path,
    *,
    local_rank: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    update: Update | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Staged:
    """Make sure that a dataset is on the local disk, and say where. All ranks of a node call it, and get one answer.

    Args:
        source: The dataset.
        local: A directory on the node's own disk.
        local_rank: 0 copies, the others wait for it.
        timeout_s: Longest wait, for the leader or for another job that copies the same dataset.
        update: Told how far the copy is.
        environment: Tells jobs apart.

    Raises:
        BadConfig: If the source is no dataset or is damaged, the local disk has no room or cannot be written, the wait
            was too long, or, on a rank that waits, what the leader's error says.
    """
    place = Place(local, read_manifest(source))
    with writing(local):
        place.prepare()
        attempt = Attempt(place.report_path(job_key(environment)))
        if local_rank:
            return _wait(place, attempt, timeout_s)
        # Twice, so that the others are told the same error as the caller.
        with attempt.leading(timeout_s), writing(local), place.locked(timeout_s):
            if place.holds_copy():
                return _found(place)
            return _copy(place, source, update or (lambda done, total, note: None))


def _found(place: Place) -> Staged:
    return Staged(
        directory=place.directory,
        dataset_hash=place.manifest.dataset_hash,
        samples=place.manifest.train.samples,
    )


def _copy(place: Place, source: Path, update: Update) -> Staged:
    place.clear()
    files = dataset_files(source, place.manifest)
    place.check_room(files)
    source_s = _source_s_per_sample(source)
    with place.filling(files), place.partial() as partial:
        figures = copy_files(files, source, partial, place.manifest, update)
        place.publish(partial)
    return replace(
        _found(place),
        copied=figures,
        source_s_per_sample=source_s,
        local_s_per_sample=seconds_per_sample(place.directory),
    )


def _source_s_per_sample(source: Path) -> float | None:
    verify = f"The source is damaged: autotune data verify {source}"
    try:
        return seconds_per_sample(source)
    except BadConfig as error:
        raise BadConfig(error.message, next_step=verify) from error
    except OSError as error:
        raise BadConfig(f"cannot read {source}: {error.strerror or error}", next_step=verify) from error


def _wait(place: Place, attempt: Attempt, timeout_s: float) -> Staged:
    started_s = time.monotonic()
    while True:
        word = attempt.read()
        if word.standing is Standing.FAILED:
            raise BadConfig(f"local rank 0 could not stage: {word.message}", next_step=word.next_step)
        if word.standing is Standing.DIED:
            raise BadConfig(
                "local rank 0 ended without a word while it staged the dataset",
                next_step="Its log says why; starting again repairs the copy.",
            )
        at_work = word.standing is Standing.AT_WORK
        if not at_work and place.holds_copy():
            return _found(place)
        if time.monotonic() - started_s > timeout_s + (_GRACE_S if at_work else 0):
            raise BadConfig(
                f"local rank 0 has not {'finished' if at_work else 'begun'} to copy the dataset to {place.root} "
                f"after {timeout_s:g} s",
                next_step="Wait longer, or look at what it is doing.",
            )
        time.sleep(_POLL_S)


def stage_data(
    resolved: ResolvedConfig, environment: Mapping[str, str] = os.environ, update: Update | None = None
) -> ResolvedConfig:
    """The configuration with its dataset on local disk, where ``train.data.stage_to`` asks for that.

    Raises:
        BadConfig: If an environment variable in the setting is not set, or what ``stage`` says.
    """
    wanted = resolved.config.data.stage_to
    if wanted is None:
        return resolved
    try:
        place = Path(string.Template(wanted).substitute(environment))
    except (KeyError, ValueError) as error:
        raise BadConfig(
            f"train.data.stage_to is {wanted!r}, and {error} is not an environment variable here",
            next_step="Set it, or name the directory: --set train.data.stage_to=/local",
        ) from error
    staged = stage(
        resolved.data_dir, place, local_rank=local_rank_of(environment), update=update, environment=environment
    )
    return replace(resolved, data_dir=staged.directory)
