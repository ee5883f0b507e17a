"""Comparison of a node with the profile's machine.

The node's code and dataset are compared as well. Everything here is pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autotune.base.units import format_bytes
from autotune.evidence.profile import Profile, is_sha256
from autotune.machine.node_facts import NodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProblem:
    """A mismatch that prevents the job from starting."""

    field: str
    """Name of the fact, such as ``gpu_count``."""
    expected: str
    found: str
    """Value of the node; ``n/a`` if it is not known."""
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
    problems: list[NodeProblem] = []
    if profile.train.device == "cuda":
        problems += _gpu_problems(profile, node, ranks)
    if node.allotted_cpus < cpus:
        problems.append(
            NodeProblem(
                field="allotted_cpus",
                expected=str(cpus),
                found=str(node.allotted_cpus),
                next_step=(
                    "Pass --cpus-per-task to srun in the script; the step did not get"
                    " the CPU cores of its job."
                ),
            )
        )
    if node.code_sha256 != code_sha256:
        problems.append(
            NodeProblem(
                field="code",
                expected=_shown(code_sha256),
                found=_shown(node.code_sha256),
                next_step=(
                    "Install the same version of this package there, or submit the job"
                    " again."
                ),
            )
        )
    dataset_hash = profile.fingerprint.dataset_hash
    if node.dataset_hash != dataset_hash:
        problems.append(
            NodeProblem(
                field="dataset",
                expected=_shown(dataset_hash),
                found=_shown(node.dataset_hash or node.dataset_missing),
                next_step=(
                    f"Copy the profile's dataset to {node.dataset_dir} on every node:"
                    f" autotune data verify {node.dataset_dir}"
                ),
            )
        )
    return tuple(problems)


def _gpu_problems(
    profile: Profile, node: NodeFacts, ranks: int
) -> Iterator[NodeProblem]:
    """Yield too few GPUs, GPUs of another model, and GPUs with less memory."""
    expected = profile.fingerprint
    next_step = (
        f"Request nodes like those of the profile, without {node.name} (slurm.exclude"
        " or slurm.constraint)."
    )
    if len(node.gpu_names) < ranks:
        yield NodeProblem(
            field="gpu_count",
            expected=str(ranks),
            found=str(len(node.gpu_names)),
            next_step=next_step,
        )
    other_names = sorted(set(node.gpu_names) - {expected.gpu_name})
    if expected.gpu_name is not None and other_names:
        yield NodeProblem(
            field="gpu_name",
            expected=expected.gpu_name,
            found=", ".join(other_names),
            next_step=next_step,
        )
    smallest_bytes = min(node.gpu_total_bytes, default=None)
    if smallest_bytes is None or expected.gpu_total_bytes is None:
        return
    if smallest_bytes < expected.gpu_total_bytes:
        yield NodeProblem(
            field="gpu_total_bytes",
            expected=str(expected.gpu_total_bytes),
            found=str(smallest_bytes),
            next_step=next_step,
        )


def describe(node: NodeFacts) -> str:
    """Describe a node on one line."""
    sizes = zip(node.gpu_names, node.gpu_total_bytes, strict=True)
    gpus = ", ".join(f"{name} {format_bytes(total)}" for name, total in sizes)
    nvlink = {True: "yes", False: "no", None: "n/a"}[node.nvlinked]
    return (
        f"{node.name}: {node.allotted_cpus} CPUs; GPUs: {gpus or 'none'}; NVLink:"
        f" {nvlink}; code {_shown(node.code_sha256)}; dataset"
        f" {_shown(node.dataset_hash)}"
    )


def _shown(text: str | None) -> str:
    """Return a text, of a hash only the first digits; ``n/a`` for None."""
    if text is None:
        return "n/a"
    return text[:12] if is_sha256(text) else text
