"""Arithmetic with figures that know how far they may be off and what they rest on. Pure.

Bounds are taken at their worst: the low end of a product is that of both factors at once. That is wider than noise that
is independent would make it, and right for what is assumed, of which nobody knows how it is distributed.
"""

from collections.abc import Callable

from autotune.core.plan import BASES, Basis, Figure


def given(value: float, source: str) -> Figure:
    """What the user says."""
    return Figure(value=value, basis="given", source=source)


def derived_basis(*figures: Figure) -> Basis:
    """What follows from these: given where all are, assumed where one is, else predicted."""
    weakest = max((figure.basis for figure in figures), key=BASES.index)
    return weakest if weakest in ("given", "assumed") else "predicted"


def times(one: Figure, other: Figure, source: str) -> Figure:
    """The product of two positive figures."""
    return _combined(lambda a, b: a * b, one, other, (0, 0), source)


def over(one: Figure, other: Figure, source: str) -> Figure:
    """The quotient of two positive figures."""
    return _combined(lambda a, b: a / b, one, other, (0, 1), source)


def scaled(figure: Figure, factor: float, source: str | None = None) -> Figure:
    """The figure times a positive number that is exact; on the same basis."""
    return Figure(
        value=factor * figure.value,
        low=None if figure.low is None else factor * figure.low,
        high=None if figure.high is None else factor * figure.high,
        confidence=figure.confidence,
        basis=figure.basis,
        source=figure.source if source is None else source,
    )


def computed(figure: Figure, factor: float, source: str) -> Figure:
    """The same, where the product is no reading any more: what was measured becomes predicted."""
    found = scaled(figure, factor, source)
    return Figure(
        value=found.value,
        low=found.low,
        high=found.high,
        confidence=found.confidence,
        basis=derived_basis(figure),
        source=source,
    )


def _combined(
    compute: Callable[[float, float], float], one: Figure, other: Figure, opposite: tuple[int, int], source: str
) -> Figure:
    ends: list[float | None] = [None, None]
    if one.low is not None or other.low is not None:
        pairs = [_ends(figure)[:: -1 if flip else 1] for figure, flip in zip((one, other), opposite, strict=True)]
        ends = [compute(a, b) for a, b in zip(*pairs, strict=True)]
    bounded = [figure.confidence for figure in (one, other) if figure.low is not None]
    return Figure(
        value=compute(one.value, other.value),
        low=ends[0],
        high=ends[1],
        # Of two intervals together nobody has said a confidence.
        confidence=bounded[0] if len(bounded) == 1 else None,
        basis=derived_basis(one, other),
        source=source,
    )


def _ends(figure: Figure) -> tuple[float, float]:
    low, high = figure.low, figure.high
    return (figure.value if low is None else low, figure.value if high is None else high)
