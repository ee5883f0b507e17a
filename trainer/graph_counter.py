"""Count of the graphs that ``torch.compile`` compiles when it should not."""

import contextlib
from collections.abc import Iterator

WARM_UP_STEPS = 3
"""Number of first optimizer steps in which it is expected that layers are compiled."""


class GraphCounter:
    """Counter of graphs that are compiled after the first steps.

    Layers are compiled again if shapes or settings change, which can take minutes.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._expected_graphs = 0
        """Graphs compiled in the first steps, or while the counter was paused."""

    def stepped(self) -> None:
        """Count a training step."""
        self._steps += 1
        if self._steps <= WARM_UP_STEPS:
            self._expected_graphs = _compiled_graphs()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude graphs compiled in the block, such as by an evaluation."""
        graphs_before = _compiled_graphs()
        yield
        self._expected_graphs += _compiled_graphs() - graphs_before

    @property
    def recompilations(self) -> int:
        """Number of graphs compiled after the first steps."""
        return _compiled_graphs() - self._expected_graphs


def _compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled.

    torch has no public count of them.
    """
    # Imported here, as Dynamo takes seconds to load, and eager models do not need it.
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
