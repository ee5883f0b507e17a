"""The fingerprint of this machine, with a model and a dataset."""

from typing import Any

from autotune.evidence.profile import Fingerprint, model_sha256
from autotune.machine.measured_device import MeasuredDevice
from trainer.formats.manifest import Manifest
from trainer.formats.train_config import ModelSettings


def fingerprint(
    site: MeasuredDevice,
    model: ModelSettings | str,
    manifest: Manifest | None,
    cuda: str | None,
) -> Fingerprint:
    """Return the profile's fingerprint of this machine, model and dataset.

    ``model`` may be the hash of what takes a model's place. Without a dataset, its hash
    is empty.
    """
    gpu, host = site.gpu, site.host
    of_gpu: dict[str, Any] = (
        {"gpu_count": 0}
        if gpu is None
        else {
            "gpu_name": gpu.name,
            "gpu_count": len(site.gpus),
            "gpu_total_bytes": gpu.total_bytes,
            "gpu_mig": gpu.mig_enabled,
            "gpu_power_cap_w": gpu.power_cap_w,
            "driver": gpu.driver,
        }
    )
    of_host = {
        name: getattr(host, name)
        for name in ("cpu_model", "allotted_cpus", "ram_total_bytes")
    }
    return Fingerprint(
        device=site.device,
        **of_gpu,
        **of_host,
        cuda=cuda,
        torch=site.versions["torch"],
        transformers=site.versions["transformers"],
        python=host.python_version,
        data_filesystem=host.disks[0].filesystem_type if host.disks else None,
        model_sha256=model if isinstance(model, str) else model_sha256(model),
        dataset_hash="" if manifest is None else manifest.dataset_hash,
    )
