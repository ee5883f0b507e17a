"""Comparison of a node with the profile's machine.

The node's code and dataset are compared as well. Everything here is pure.
"""

from dataclasses import dataclass

from autotune.base.units import format_bytes
from autotune.evidence.profile import Profile, is_sha256
from autotune.machine.node_facts import NodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProblem:
    """A mismatch that prevents the job from starting."""

    field: str
    expected: str
    found: str
    next_step: str


def problems_of(
    profile: Profile, node: NodeFacts, *, ranks: int, cpus: int, code_sha256: str
) -> tuple[NodeProblem, ...]:
    """Return the mismatches, the cheapest to fix last.

    Args:
        profile: Profile of the run.
        node: Facts about the node.
        ranks: Ranks of the node.
        cpus: CPU cores requested from SLURM for the node's task.
        code_sha256: Hash of the trainer's code at submission.
    """
    there = profile.fingerprint
    others = (
        f"Request nodes like those of the profile, without {node.name} (slurm.exclude"
        " or slurm.constraint)."
    )
    strangers = ", ".join(sorted(set(node.gpu_names) - {there.gpu_name}))
    least_bytes = min(node.gpu_total_bytes, default=None)
    too_small = (
        least_bytes is not None
        and there.gpu_total_bytes is not None
        and least_bytes < there.gpu_total_bytes
    )
    checks: list[tuple[str, object, object, str, bool]] = []
    if profile.train.device == "cuda":
        checks = [
            (
                "gpu_count",
                ranks,
                len(node.gpu_names),
                others,
                len(node.gpu_names) < ranks,
            ),
            (
                "gpu_name",
                there.gpu_name,
                strangers,
                others,
                there.gpu_name is not None and strangers != "",
            ),
            ("gpu_total_bytes", there.gpu_total_bytes, least_bytes, others, too_small),
        ]
    processors = (
        "Pass --cpus-per-task to srun in the script; the step did not get the CPU cores"
        " of its job."
    )
    code = "Install the same version of this package there, or submit the job again."
    data = (
        f"Copy the profile's dataset to {node.dataset_dir} on every node: autotune data"
        f" verify {node.dataset_dir}"
    )
    dataset = node.dataset_hash or node.dataset_missing
    checks += [
        (
            "allotted_cpus",
            cpus,
            node.allotted_cpus,
            processors,
            node.allotted_cpus < cpus,
        ),
        ("code", code_sha256, node.code_sha256, code, node.code_sha256 != code_sha256),
        (
            "dataset",
            there.dataset_hash,
            dataset,
            data,
            node.dataset_hash != there.dataset_hash,
        ),
    ]
    return tuple(
        NodeProblem(
            field=field, expected=_shown(want), found=_shown(have), next_step=next_step
        )
        for field, want, have, next_step, wrong in checks
        if wrong
    )


def describe(node: NodeFacts) -> str:
    """Describe a node on one line."""
    sizes = zip(node.gpu_names, node.gpu_total_bytes, strict=True)
    gpus = ", ".join(f"{name} {format_bytes(total)}" for name, total in sizes)
    linked = {True: "yes", False: "no", None: "n/a"}[node.nvlinked]
    return (
        f"{node.name}: {node.allotted_cpus} CPUs; GPUs: {gpus or 'none'}; NVLink:"
        f" {linked}; code {_shown(node.code_sha256)}; dataset"
        f" {_shown(node.dataset_hash)}"
    )


def _shown(value: object) -> str:
    text = "n/a" if value is None else str(value)
    return text[:12] if is_sha256(text) else text
