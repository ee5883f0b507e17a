"""Compare a profile with this machine, model and dataset: what fits, what differs, what nobody here can tell."""

from collections.abc import Callable
from pathlib import Path

from autotune.core.profile import Fingerprint
from autotune.core.verification import Check, LedgerCheck, Verification
from autotune.decide.ledger import compare, shown
from autotune.measure.host import Host
from autotune.measure.nvml import GpuMonitor
from autotune.search.reviews import ReviewedProfile
from autotune.search.site import fingerprint, open_site
from trainer.dataset import read_manifest
from trainer.errors import TrainerError

_TOLD_ANYWHERE = ("model_sha256", "dataset_hash", "data_filesystem", "torch", "transformers", "python")
"""Fields that do not say which GPU and host it is."""


def verify(
    stored: ReviewedProfile,
    data: Path | None,
    host: Host,
    monitor: GpuMonitor,
    read_cuda: Callable[[], str | None],
    *,
    ledger: LedgerCheck | None = None,
) -> Verification:
    """Compare a profile with this machine, and with its dataset at ``data`` or where the profile says.

    ``read_cuda`` gives the CUDA version that torch is built for; it is called only on a machine with the profile's GPU.
    """
    train, made_on, manifest, no_data = stored.profile.train, stored.profile.fingerprint, None, ""
    try:
        manifest = read_manifest(stored.data_dir(data))
    except TrainerError as error:
        no_data = error.message
    on_gpu = made_on.device == "cuda"
    place = stored.data_here(data) or stored.path.parent
    site = open_site("auto" if on_gpu else "cpu", place, host, monitor, measures=False)
    missing = [name for name in ("torch", "transformers") if site.versions.setdefault(name, "n/a") == "n/a"]
    # On CPUs nothing is computed by CUDA, whichever version torch was built for.
    cuda = made_on.cuda if site.device == "cpu" else read_cuda()
    here = fingerprint(site, train.model, manifest, cuda)
    unknown: dict[str, str] = {}
    if elsewhere := on_gpu and site.device == "cpu":
        why = f"this is not the profile's machine: {site.gpu_absent or 'no GPU is in use'}"
        unknown |= dict.fromkeys((name for name in Fingerprint.model_fields if name not in _TOLD_ANYWHERE), why)
    if elsewhere or manifest is None:
        unknown["data_filesystem"] = no_data or "another machine may see other disks"
    if manifest is None:
        unknown["dataset_hash"] = no_data
    unknown |= dict.fromkeys(missing, "it is not installed here")
    recorded, present = stored.recorded_sha256 or "n/a", stored.standing.present_sha256
    checks = [Check(field="content", found="same" if stored.intact else "warn", profile=recorded, here=present)]
    # What [train] names twice must say the same as the fingerprint, or figures are of something else.
    twice: dict[str, tuple[str, str]] = {"train.device": (made_on.device, train.device)}
    if train.data.dataset_hash is not None:
        twice["train.data.dataset_hash"] = made_on.dataset_hash, train.data.dataset_hash
    for field, (made, says) in twice.items():
        if made != says:
            checks.append(Check(field=field, found="refuse", profile=made, here=says))
    differ = {one.field: one for one in compare(made_on, here)}
    for field in Fingerprint.model_fields:
        said = shown(getattr(made_on, field))
        if field in unknown:
            checks.append(Check(field=field, found="not checkable here", profile=said, here=unknown[field]))
        else:
            same = Check(field=field, found="same", profile=said, here=shown(getattr(here, field)))
            checks.append(differ.get(field, same))
    return Verification(checks=tuple(checks), ledger=ledger)
