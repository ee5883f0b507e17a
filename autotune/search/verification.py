"""Hold a profile against this machine, model and dataset: what fits, what differs, what nobody here can tell."""

from collections.abc import Callable
from pathlib import Path

from autotune.core.profile import Fingerprint, Profile
from autotune.core.verification import Check, LedgerCheck, Verification
from autotune.decide.ledger import compare, shown
from autotune.measure.host import Host
from autotune.measure.nvml import GpuMonitor
from autotune.search.profiles import StoredProfile
from autotune.search.reviews import ReviewedProfile
from autotune.search.site import fingerprint, open_site
from trainer.dataset import read_manifest
from trainer.errors import TrainerError

_OF_MODEL, _OF_DATA = ("model_sha256",), ("dataset_hash", "data_filesystem")
_OF_SOFTWARE = ("torch", "transformers", "python")
_NOT_INSTALLED = "not installed"


def verify(
    stored: ReviewedProfile,
    data: Path | None,
    host: Host,
    monitor: GpuMonitor,
    read_cuda: Callable[[], str | None],
    *,
    ledger: LedgerCheck | None = None,
) -> Verification:
    """Hold a profile against this machine.

    Args:
        stored: The profile.
        data: Where its dataset is; None for where the profile says.
        host: Describes the host.
        monitor: Describes the GPUs.
        read_cuda: The CUDA version that torch is built for; asked only on a machine with the profile's GPU.
        ledger: What the ledger beside it says of it.
    """
    profile = stored.profile
    kept = StoredProfile(path=stored.path, profile=profile, intact=stored.intact)
    manifest, no_data = None, ""
    try:
        manifest = read_manifest(kept.data_dir(data))
    except TrainerError as error:
        no_data = error.message
    on_gpu = profile.fingerprint.device == "cuda"
    disk = kept.data_here(data) or stored.path.parent
    site = open_site("auto" if on_gpu else "cpu", disk, host, monitor, measures=False)
    missing = {library: site.versions.setdefault(library, _NOT_INSTALLED) for library in ("torch", "transformers")}
    elsewhere = on_gpu and site.device == "cpu"
    # On CPUs nothing is computed by CUDA, whichever version torch was built for.
    cuda = profile.fingerprint.cuda if site.device == "cpu" else read_cuda()
    here = fingerprint(site, profile.train.model, manifest, cuda)
    unknown: dict[str, str] = {}
    if elsewhere:
        known = (*_OF_MODEL, *_OF_DATA, *_OF_SOFTWARE)
        why = f"this is not the profile's machine: {site.gpu_absent or 'no GPU is in use'}"
        unknown |= dict.fromkeys((name for name in Fingerprint.model_fields if name not in known), why)
    if elsewhere or manifest is None:
        unknown["data_filesystem"] = no_data or "another machine may see other disks"
    if manifest is None:
        unknown["dataset_hash"] = no_data
    unknown |= {library: "it is not installed here" for library, found in missing.items() if found == _NOT_INSTALLED}
    checks = (_content(stored), *_settings(profile), *_fields(profile, here, unknown))
    return Verification(checks=checks, ledger=ledger)


def _content(stored: ReviewedProfile) -> Check:
    return Check(
        field="content",
        found="same" if stored.intact else "warn",
        profile=stored.recorded_sha256 or "n/a",
        here=stored.standing.present_sha256,
    )


def _settings(profile: Profile) -> list[Check]:
    """What ``[train]`` names twice must say the same as the fingerprint, or figures are of something else."""
    train, made_on = profile.train, profile.fingerprint
    pairs: list[tuple[str, str, str]] = [("train.device", made_on.device, train.device)]
    if train.data.dataset_hash is not None:
        pairs.append(("train.data.dataset_hash", made_on.dataset_hash, train.data.dataset_hash))
    return [Check(field=field, found="refuse", profile=made, here=says) for field, made, says in pairs if made != says]


def _fields(profile: Profile, here: Fingerprint, unknown: dict[str, str]) -> list[Check]:
    made_on = profile.fingerprint
    differences = {one.field: one for one in compare(made_on, here)}
    found = []
    for field in Fingerprint.model_fields:
        said = getattr(made_on, field)
        if field in unknown:
            found.append(Check(field=field, found="not checkable here", profile=shown(said), here=unknown[field]))
        else:
            same = Check(field=field, found="same", profile=shown(said), here=shown(getattr(here, field)))
            found.append(differences.get(field, same))
    return found
