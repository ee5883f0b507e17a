"""The trials in a profile's trial log that are its own. Pure.

A trial log belongs to the name of a profile, so another profile of the same name may
have written to it.
"""

from collections.abc import Sequence

from autotune.evidence.profile import Fingerprint
from autotune.trials.values import TrialRecord
from trainer.formats.canonical_json import canonical_sha256


def own_records(
    records: Sequence[TrialRecord],
    fingerprint: Fingerprint,
    seq_length_tokens: int | None,
) -> tuple[TrialRecord, ...]:
    """Return the trials in a profile's trial log that belong to the profile.

    Args:
        records: Trials in the trial log.
        fingerprint: Model, dataset and kind of device of the profile.
        seq_length_tokens: Sequence length of the profile; None accepts any length.
    """
    # All trials of a site are of one model and one dataset. If one of them is of
    # another profile, so are those that name neither.
    other_sites = {record.site for record in records if _is_other(record, fingerprint)}
    return tuple(
        record
        for record in records
        if record.site not in other_sites and _has_length(record, seq_length_tokens)
    )


def _has_length(record: TrialRecord, seq_length_tokens: int | None) -> bool:
    """Return whether a trial's sequences have this length, or it has none."""
    if seq_length_tokens is None:
        return True
    # None for a trial without sequences, such as one of links.
    length_tokens = record.trial.config.get("seq_length_tokens")
    return length_tokens in (None, seq_length_tokens)


def _is_other(record: TrialRecord, fingerprint: Fingerprint) -> bool:
    """Return whether a trial is known to be of another model, dataset or device."""
    origin = record.made_on
    if origin is None:
        # An older trial log has no origins, so the device is unknown.
        model_sha256 = _model_hash_by_config(record)
        dataset_hash = _dataset_hash_by_config(record)
        has_model = model_sha256 in (None, fingerprint.model_sha256)
        has_dataset = dataset_hash in (None, fingerprint.dataset_hash)
        return not (has_model and has_dataset)
    if origin.model_sha256 != fingerprint.model_sha256:
        return True
    if origin.dataset_hash != fingerprint.dataset_hash:
        return True
    if origin.gpu_name is None and fingerprint.gpu_name is not None:
        # Data loading for a GPU may be measured on a machine without one, which replays
        # the GPU's steps.
        return False
    if origin.gpu_name != fingerprint.gpu_name:
        return True
    return origin.gpu_name is None and origin.cpu_model != fingerprint.cpu_model


def _model_hash_by_config(record: TrialRecord) -> str | None:
    """Return the hash of the model in a trial's settings; None if they have none.

    It is that of ``Fingerprint.model_sha256``, which the model's name does not change.
    """
    model = record.trial.config.get("model")
    if not isinstance(model, dict):
        return None
    return canonical_sha256(
        {name: value for name, value in model.items() if name != "name"}
    )


def _dataset_hash_by_config(record: TrialRecord) -> object:
    """Return the hash of the dataset in a trial's settings; None if they have none."""
    data = record.trial.config.get("data")
    return data.get("dataset_hash") if isinstance(data, dict) else None
