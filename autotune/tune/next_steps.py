"""The commands to run after a tuning."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from autotune.evidence.profile import Profile
from autotune.profiles.store import read_profile


def next_steps(profiles: Sequence[Path], *, nodes: int) -> tuple[str, ...]:
    """Return the commands to run next with tuned profiles, in order.

    They are for a training on ``nodes`` nodes.
    """
    if not profiles:
        return ()
    path = shlex.quote(str(profiles[0]))
    profile = read_profile(profiles[0]).profile
    advise = f"autotune advise {path}"
    approve = (
        f"autotune profile approve {path} --by NAME  # after you have read the report"
    )
    if profile.has_train:
        return (advise, approve, *_training_steps(path, profile, nodes))
    values = f"autotune profile show {path}  # the values to use in your code, and why"
    return (values, advise, approve)


def _training_steps(path: str, profile: Profile, nodes: int) -> tuple[str, ...]:
    """Return the commands with which the bundled trainer trains."""
    if nodes < 2:
        return (f"autotune train {path}",)
    steps = [
        f"autotune plan {path} --nodes {nodes}",
        f"autotune train {path} --nodes {nodes} --slurm",
    ]
    network = profile.evidence.network
    if network is None or network.nodes < 2:
        steps.insert(
            0,
            f"autotune network {path} --slurm  # the network between nodes was not"
            " measured",
        )
    return tuple(steps)
