"""Names of profiles and runs as a report shows them: short, and each another one. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autotune.show.report.inputs import ReportedProfile, ReportedRun
from autotune.show.tables import inert

MOST_LETTERS = 36
"""Longer ones are cut in their middle, as charts have no room for them; what tells names apart is mostly at an end."""


def named(
    profiles: Sequence[ReportedProfile], runs: Sequence[ReportedRun]
) -> tuple[tuple[ReportedProfile, ...], tuple[ReportedRun, ...]]:
    """The same with labels: by their own names, and by as many directories above as it takes to tell them apart."""
    parts = [(*one.path.parts[:-1], one.path.stem) for one in profiles]
    parts += [run.run.directory.parts for run in runs]
    labels = told_apart(parts)
    return (
        tuple(replace(one, label=label) for one, label in zip(profiles, labels, strict=False)),
        tuple(replace(run, label=label) for run, label in zip(runs, labels[len(profiles) :], strict=True)),
    )


def told_apart(paths: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """A name for each path, of its last parts; those that are the same to the end, or once they are cut, are counted.

    Args:
        paths: The parts of each.
    """
    depths = [1] * len(paths)
    for _ in range(max(map(len, paths), default=0)):
        names = [_tail(parts, depth) for parts, depth in zip(paths, depths, strict=True)]
        often = Counter(names)
        deeper = [
            depth + (often[name] > 1 and depth < len(parts))
            for name, depth, parts in zip(names, depths, paths, strict=True)
        ]
        if deeper == depths:
            break
        depths = deeper
    return _counted([_cut(_tail(parts, depth)) for parts, depth in zip(paths, depths, strict=True)])


def _tail(parts: Sequence[str], depth: int) -> str:
    return inert("/".join(parts[-depth:])) or "unnamed"


def _cut(name: str, most: int = MOST_LETTERS) -> str:
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[: most - 1 - half]}…{name[-half:]}"


def _counted(names: Sequence[str]) -> tuple[str, ...]:
    """The second of the same name has a 2 behind it; no name is given twice."""
    taken, found = set(names), []
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        label = name
        while seen[name] > 1 and label in taken:
            mark = f" ({seen[name]})"
            label = _cut(name, MOST_LETTERS - len(mark)) + mark
            seen[name] += label in taken
        taken.add(label)
        found.append(label)
    return tuple(found)
