"""Compare a node with what the profile was tuned on, and with the code and data it should see. Pure."""

from dataclasses import dataclass

from autotune.core.profile import Fingerprint
from autotune.core.units import format_bytes

_SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """What a job needs of each of its nodes."""

    ranks: int
    cpus: int
    """Asked of SLURM for the node's task."""
    code_sha256: str
    """Of the trainer, where the job was submitted."""
    made_on: Fingerprint
    """Of the profile: device, GPU and dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node is found to be."""

    name: str
    allotted_cpus: int
    gpu_names: tuple[str, ...]
    gpu_total_bytes: tuple[int, ...]
    nvlinked: bool | None
    """Whether every pair of the GPUs is; None with fewer than two, or where nobody can tell."""
    code_sha256: str
    dataset_hash: str | None
    """None where there is no dataset."""
    dataset_place: str
    dataset_missing: str | None = None
    """Why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProblem:
    """One field that keeps the job from beginning."""

    field: str
    expected: str
    found: str
    next_step: str


def problems_of(expected: Needed, node: NodeFacts) -> tuple[NodeProblem, ...]:
    """Return what does not fit, what is cheapest to mend last."""
    found: list[NodeProblem] = []

    def check(field: str, want: object, have: object, next_step: str, *, wrong: bool) -> None:
        if wrong:
            found.append(NodeProblem(field=field, expected=_shown(want), found=_shown(have), next_step=next_step))

    made_on = expected.made_on
    if made_on.device == "cuda":
        others = f"Ask for nodes like those the profile was tuned on, without {node.name} (slurm.exclude, constraint)."
        check("gpu_count", expected.ranks, len(node.gpu_names), others, wrong=len(node.gpu_names) < expected.ranks)
        names = sorted(set(node.gpu_names) - {made_on.gpu_name})
        check(
            "gpu_name", made_on.gpu_name, ", ".join(names), others, wrong=made_on.gpu_name is not None and bool(names)
        )
        least = min(node.gpu_total_bytes, default=None)
        less = least is not None and made_on.gpu_total_bytes is not None and least < made_on.gpu_total_bytes
        check("gpu_total_bytes", made_on.gpu_total_bytes, least, others, wrong=less)
    check(
        "allotted_cpus",
        expected.cpus,
        node.allotted_cpus,
        "The step was not given the processors of its job: does srun in the script say --cpus-per-task?",
        wrong=node.allotted_cpus < expected.cpus,
    )
    check(
        "code",
        expected.code_sha256,
        node.code_sha256,
        "Install the version of this package there that the job was submitted with; or submit the job again.",
        wrong=node.code_sha256 != expected.code_sha256,
    )
    check(
        "dataset",
        made_on.dataset_hash,
        node.dataset_hash or node.dataset_missing,
        f"Give every node the dataset of the profile at {node.dataset_place}: autotune data verify.",
        wrong=node.dataset_hash != made_on.dataset_hash,
    )
    return tuple(found)


def describe(node: NodeFacts) -> str:
    """Describe a node on one line."""
    gpus = ", ".join(
        f"{name} {format_bytes(total)}" for name, total in zip(node.gpu_names, node.gpu_total_bytes, strict=True)
    )
    linked = {True: "yes", False: "no", None: "n/a"}[node.nvlinked]
    return (
        f"{node.name}: {node.allotted_cpus} CPUs; GPUs: {gpus or 'none'}; NVLink: {linked}; "
        f"code {_shown(node.code_sha256)}; dataset {_shown(node.dataset_hash)}"
    )


def _shown(value: object) -> str:
    if value is None:
        return "n/a"
    text = str(value)
    is_hash = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return text[:_SHOWN_DIGITS] if is_hash else text
