"""Checks of the dataset: does it match the profile, and is all of its text used?"""

from pathlib import Path

from trainer.config.resolve import ResolvedConfig
from trainer.data.batch_plan import SPECIAL_TOKENS_PER_SAMPLE
from trainer.data.dataset import TokenDataset
from trainer.formats.errors import BadConfig
from trainer.formats.events import EventRow
from trainer.formats.manifest import MAX_CUT_TOKENS_SHARE, Manifest
from trainer.formats.train_config import TrainConfig
from trainer.preflight.start_warning import start_warning


def open_dataset(resolved: ResolvedConfig) -> TokenDataset:
    """Open the dataset.

    Raises:
        BadConfig: If it is empty, or its hash does not match the profile.
    """
    dataset = TokenDataset.open(resolved.data_dir)
    expected_hash = resolved.config.data.dataset_hash
    dataset_hash = dataset.manifest.dataset_hash
    if expected_hash is not None and expected_hash != dataset_hash:
        raise BadConfig(
            f"dataset {resolved.data_dir} does not match the profile: its hash is"
            f" {dataset_hash[:12]}…, not {expected_hash[:12]}…",
            next_step=(
                "Pass the profile's dataset with --data DIR, or tune again on this"
                " one: autotune tune --model MODEL --data DIR"
            ),
            docs="dataset-mismatch",
        )
    if not len(dataset):
        raise BadConfig(
            f"dataset {resolved.data_dir} is empty",
            next_step="Pass another one with --data DIR.",
        )
    return dataset


def check_data(
    config: TrainConfig, manifest: Manifest, directory: Path
) -> list[EventRow]:
    """Return warnings about text that is cut off, and about missing validation data."""
    warnings = []
    limit_tokens = config.seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE
    cut_share = manifest.train.cut_tokens_share(limit_tokens)
    if cut_share is not None and cut_share > MAX_CUT_TOKENS_SHARE:
        warnings.append(
            start_warning(
                f"{cut_share:.1%} of the tokens in {directory} are cut off at the"
                f" sequence length of {config.seq_length_tokens}",
                "Tune for longer sequences (--seq-length), or prepare the dataset again"
                f" with --max-tokens {limit_tokens} --long split.",
            )
        )
    interval_steps = config.evaluation.interval_steps
    if interval_steps is not None and not manifest.validation.samples:
        warnings.append(
            start_warning(
                f"train.evaluation.interval_steps = {interval_steps}"
                f" has no effect: {directory} has 0 validation samples, and"
                f" {manifest.train.samples:,} for training",
                "Prepare the dataset again with a larger --validation-share.",
            )
        )
    return warnings
