"""Look at the node that this process runs on, for the preflight of a job."""

import itertools
import os
from pathlib import Path

from autotune.cluster.preflight import NodeFacts
from autotune.core.hardware import Unavailable, visible_devices
from autotune.measure.host import Host
from autotune.measure.nvml import GpuMonitor
from trainer.dataset import read_manifest
from trainer.errors import TrainerError
from trainer.record import code_sha256


def look_at_node(name: str, data_dir: Path, host: Host, monitor: GpuMonitor) -> NodeFacts:
    """Return what this node is, and which code and data it sees."""
    gpus = visible_devices(monitor.devices(), os.environ)
    links = [monitor.nvlinked(one.uuid, other.uuid) for one, other in itertools.combinations(gpus, 2)]
    told = [link for link in links if not isinstance(link, Unavailable)]
    linked: bool | None = all(told)
    if linked and not (links and len(told) == len(links)):
        linked = None
    dataset, missing = None, None
    try:
        dataset = read_manifest(data_dir).dataset_hash
    except TrainerError as error:
        missing = error.message
    return NodeFacts(
        name=name,
        allotted_cpus=host.facts([]).allotted_cpus,
        gpu_names=tuple(gpu.name for gpu in gpus),
        gpu_total_bytes=tuple(gpu.total_bytes for gpu in gpus),
        nvlinked=linked,
        code_sha256=code_sha256(),
        dataset_hash=dataset,
        dataset_place=str(data_dir),
        dataset_missing=missing,
    )
