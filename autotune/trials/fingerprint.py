"""The fingerprint of this machine, with a model and a dataset."""

from typing import Any

from autotune.evidence.profile import Fingerprint
from autotune.machine.measured_device import MeasuredDevice


def fingerprint(
    site: MeasuredDevice,
    cuda: str | None,
    *,
    model_sha256: str,
    dataset_hash: str,
) -> Fingerprint:
    """Return the profile's fingerprint of this machine, model and dataset.

    Args:
        site: The measured machine.
        cuda: CUDA version that torch is built for; None without CUDA.
        model_sha256: Hash of the model, or of the code that takes its place.
        dataset_hash: Hash of the dataset; empty without one.
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
        model_sha256=model_sha256,
        dataset_hash=dataset_hash,
    )
