"""Hash of a site: the machine, software, model and dataset on which results depend."""

from collections.abc import Mapping

from autotune import __version__
from autotune.evidence.profile import Fingerprint
from trainer.formats.canonical_json import canonical_sha256

_VARIABLES = (
    # CPU cores, threads and the order of GPUs.
    "AUTOTUNE_NUMA_BINDING",
    "CUDA_DEVICE_ORDER",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    # Allocators and workspaces.
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUBLAS_WORKSPACE_CONFIG",
    # Launches and loading of kernels, and libraries that replace others.
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "LD_PRELOAD",
    # Communication between ranks.
    "NCCL_BUFFSIZE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_DISABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
"""Environment variables that trials inherit, and that change their memory or speed."""


def site_hash(site_fingerprint: Fingerprint, environment: Mapping[str, str]) -> str:
    """Return a hash of a site; results are reused only at a site of the same hash.

    Args:
        site_fingerprint: Machine, software, model and dataset of the trials.
        environment: Environment variables of the trials' processes.

    Returns:
        The first 16 hexadecimal digits of a SHA-256.
    """
    # The size of the host's memory and the kind of disk change no result.
    site = site_fingerprint.model_copy(
        update={"data_filesystem": None, "ram_total_bytes": 1}
    ).model_dump(mode="json")
    site["tool_version"] = __version__
    site["environment"] = {name: environment.get(name) for name in _VARIABLES}
    return canonical_sha256(site)[:16]
