"""Count what a profile's rows hold, for an export to another trainer."""

from pathlib import Path

from autotune.decide.export import RowsHold
from autotune.search.profiles import StoredProfile
from trainer.dataset import TokenDataset


def rows_hold(stored: StoredProfile, data: Path | None) -> RowsHold:
    """Non-padding tokens and samples of a row, from a part of the dataset; without it, what the profile says.

    Raises:
        TrainerError: If ``data`` is no dataset.
    """
    profile, directory = stored.profile, data or stored.data_here()
    if directory is None:
        packed = profile.train.layout == "packed"
        return RowsHold(
            real_tokens=profile.mean_real_tokens_per_row,
            samples=None if packed else 1.0,
            source="the dataset is not here" if packed else "one sample in each row",
        )
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
