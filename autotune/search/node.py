"""Looks at the node that this process runs on, for the preflight of a job, and says what a profile expects of it."""

import itertools
import os
from pathlib import Path

from autotune.cluster.preflight import Needed, NodeFacts
from autotune.core.hardware import Unavailable, visible_devices
from autotune.core.profile import Profile
from autotune.measure.host import Host
from autotune.measure.nvml import GpuMonitor
from trainer.dataset import read_manifest
from trainer.errors import TrainerError
from trainer.record import code_sha256


def expected_of(profile: Profile, *, ranks: int, cpus: int, code_sha256: str) -> Needed:
    """Return what a job from this profile needs of a node."""
    there = profile.fingerprint
    return Needed(
        ranks=ranks,
        cpus=cpus,
        device=profile.train.device,
        gpu_name=there.gpu_name,
        gpu_total_bytes=there.gpu_total_bytes,
        code_sha256=code_sha256,
        dataset_hash=there.dataset_hash,
    )


def look_at_node(name: str, data_dir: Path, host: Host, monitor: GpuMonitor) -> NodeFacts:
    """What this node is, and which code and data it sees."""
    gpus = visible_devices(monitor.devices(), os.environ)
    missing: str | None = None
    dataset: str | None = None
    try:
        dataset = read_manifest(data_dir).dataset_hash
    except TrainerError as error:
        missing = error.message
    return NodeFacts(
        name=name,
        allotted_cpus=host.facts([]).allotted_cpus,
        gpu_names=tuple(gpu.name for gpu in gpus),
        gpu_total_bytes=tuple(gpu.total_bytes for gpu in gpus),
        nvlinked=_all_linked([gpu.uuid for gpu in gpus], monitor),
        code_sha256=code_sha256(),
        dataset_hash=dataset,
        dataset_place=str(data_dir),
        dataset_missing=missing,
    )


def _all_linked(uuids: list[str], monitor: GpuMonitor) -> bool | None:
    answers = [monitor.nvlinked(one, other) for one, other in itertools.combinations(uuids, 2)]
    known = [answer for answer in answers if not isinstance(answer, Unavailable)]
    if not all(known):
        return False
    return True if known and len(known) == len(answers) else None
