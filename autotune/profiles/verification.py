"""Comparison of a profile with this machine and its dataset, without measurements."""

from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.evidence.profile import Fingerprint, Profile, model_sha256
from autotune.machine.host import Host
from autotune.machine.measured_device import MeasuredDevice, open_device
from autotune.profiles.approval import ProfileWithApproval
from autotune.profiles.checks import Check, Verification
from autotune.profiles.decide.fingerprint_check import check_fields, field_text
from autotune.trials.fingerprint import fingerprint
from trainer.formats.errors import TrainerError
from trainer.formats.manifest import Manifest, read_manifest
from trainer.formats.nvml import GpuMonitor

_MACHINE_INDEPENDENT_FIELDS = (
    "model_sha256",
    "dataset_hash",
    "data_filesystem",
    "torch",
    "transformers",
    "python",
)
"""Fingerprint fields that can be checked without the profile's GPU and host."""
_FIELDS_OF_TRAINER = ("model_sha256", "dataset_hash")
"""Fingerprint fields that only the bundled trainer has: the hash of your own code is in
the place of a model's, and it has its own data."""
_LIBRARIES = ("torch", "transformers")
"""Libraries whose versions are in the fingerprint, and which may be missing here."""


def verify_profile(
    stored: ProfileWithApproval,
    data: Path | None,
    host: Host,
    monitor: GpuMonitor,
    read_cuda: Callable[[], str | None],
) -> Verification:
    """Compare a profile with this machine and its dataset.

    Args:
        stored: Profile to compare.
        data: Directory of the dataset; None means the environment variable
            AUTOTUNE_DATA, else the path in the profile.
        host: Host to read.
        monitor: GPUs to read.
        read_cuda: Function that returns the CUDA version that torch is built for; it
            is called only if a GPU is compared.

    Returns:
        A check of the content and of every field of the fingerprint, and an error for
        each setting that contradicts the fingerprint.
    """
    profile = stored.profile
    made_on = profile.fingerprint
    manifest: Manifest | None = None
    no_dataset: str | None = None
    if profile.has_train:
        try:
            manifest = read_manifest(stored.data_dir(data))
        except TrainerError as error:
            no_dataset = error.message
    site = open_device(
        "auto" if made_on.device == "cuda" else "cpu",
        # Without a dataset, the file system of the profile is read, and not compared.
        stored.existing_data_dir(data) or stored.path.parent,
        host,
        monitor,
        measures=False,
    )
    unknown = _unknown_fields(made_on, site, no_dataset)
    # A fingerprint requires these versions; a missing one is not compared.
    for library in _LIBRARIES:
        site.versions.setdefault(library, "n/a")
    # On a CPU the CUDA version that torch was built for does not matter.
    cuda = made_on.cuda if site.device == "cpu" else read_cuda()
    here = fingerprint(
        site,
        cuda,
        model_sha256=(
            model_sha256(profile.train.model)
            if profile.has_train
            else made_on.model_sha256
        ),
        dataset_hash="" if manifest is None else manifest.dataset_hash,
    )
    return Verification(
        checks=(
            _check_content(stored),
            *_check_repeated_fields(profile),
            *_check_sources(profile),
            *(
                check
                for check in check_fields(made_on, here, unknown)
                if profile.has_train or check.field not in _FIELDS_OF_TRAINER
            ),
        )
    )


def _unknown_fields(
    made_on: Fingerprint, site: MeasuredDevice, no_dataset: str | None
) -> dict[str, str]:
    """Return the fingerprint fields that cannot be compared here, with the reasons.

    Args:
        made_on: Fingerprint of the profile.
        site: This machine.
        no_dataset: Reason why there is no dataset; None if there is one.
    """
    unknown: dict[str, str] = {}
    # The profile was measured on a GPU that this machine lacks, such as a login node.
    if made_on.device == "cuda" and site.device == "cpu":
        reason = site.gpu_absent or "no GPU is in use"
        for name in Fingerprint.model_fields:
            if name not in _MACHINE_INDEPENDENT_FIELDS:
                unknown[name] = f"this is not the profile's machine: {reason}"
        unknown["data_filesystem"] = "this machine may mount other disks"
    if no_dataset is not None:
        unknown["data_filesystem"] = no_dataset
        unknown["dataset_hash"] = no_dataset
    for library in _LIBRARIES:
        if site.versions.get(library, "n/a") == "n/a":
            unknown[library] = "not installed here"
    return unknown


def _check_content(stored: ProfileWithApproval) -> Check:
    """Compare the profile's content with the hash that it was written with."""
    return Check(
        field="content",
        found="same" if stored.intact else "warning",
        profile=stored.recorded_sha256 or "n/a",
        here=stored.approval.present_sha256,
    )


def _check_sources(profile: Profile) -> Iterator[Check]:
    """Yield the source of each function of yours, which is not imported to compare it.

    Measuring again does that: trials of another source do not count.
    """
    for role, sha256 in profile.subject.sources.items():
        yield Check(
            field=f"subject.sources.{role}",
            found="not compared",
            profile=field_text(sha256),
            here="your code is not imported to check it",
        )


def _check_repeated_fields(profile: Profile) -> Iterator[Check]:
    """Yield an error for each setting that contradicts the profile's own fingerprint.

    Two settings repeat a field of the fingerprint. If they do not match, the figures
    were not measured with these settings. They are the ``here`` of a check.
    """
    if not profile.has_train:
        return
    train, made_on = profile.train, profile.fingerprint
    if train.device != made_on.device:
        yield Check(
            field="train.device",
            found="error",
            profile=made_on.device,
            here=train.device,
        )
    dataset_hash = train.data.dataset_hash
    if dataset_hash is not None and dataset_hash != made_on.dataset_hash:
        yield Check(
            field="train.data.dataset_hash",
            found="error",
            profile=made_on.dataset_hash,
            here=dataset_hash,
        )
