"""Look at what a profile's rows hold, and say the profile in the words of another trainer."""

from pathlib import Path

from autotune.core.export import Export, RowsHold
from autotune.core.profile import Profile
from autotune.core.targets import Target
from autotune.decide.export import Subject, export_to
from autotune.search.profiles import StoredProfile
from trainer.dataset import TokenDataset


def export_profile(
    stored: StoredProfile, target: Target, *, nodes: int, ranks_per_node: int, data: Path | None
) -> Export:
    """The settings of a profile for another trainer.

    Args:
        stored: The profile.
        target: The other trainer.
        nodes: As many are meant to train together.
        ranks_per_node: Ranks of each.
        data: The dataset's directory; None looks where the profile says, and does without.

    Raises:
        TrainerError: If what is named is no dataset.
    """
    hold = rows_hold(stored, data)
    return export_to(target, Subject(profile=stored.profile, nodes=nodes, ranks_per_node=ranks_per_node, hold=hold))


def rows_hold(stored: StoredProfile, data: Path | None) -> RowsHold:
    """Real tokens and samples of a row, by laying a part of the dataset out; without it, what the profile says.

    Raises:
        TrainerError: If ``data`` is no dataset.
    """
    profile, directory = stored.profile, data or stored.data_here()
    if directory is not None:
        return _of_dataset(profile, directory)
    return RowsHold(
        real_tokens=profile.mean_real_tokens_per_row,
        samples=None if profile.train.layout == "packed" else 1.0,
        source="the dataset is not here" if profile.train.layout == "packed" else "one sample in each row",
    )


def _of_dataset(profile: Profile, directory: Path) -> RowsHold:
    from trainer.batch import row_statistics

    dataset = TokenDataset.open(directory)
    try:
        found = row_statistics(profile.train, dataset)
    finally:
        dataset.close()
    other = dataset.manifest.dataset_hash != profile.fingerprint.dataset_hash
    return RowsHold(
        real_tokens=found.mean_real_tokens,
        samples=found.mean_samples,
        source="another dataset than the profile was tuned on" if other else "rows of the dataset, a part laid out",
    )
