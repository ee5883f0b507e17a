import pytest
import torch

from trainer.graph_counter import WARM_UP_STEPS, GraphCounter


@pytest.fixture
def graph_counter() -> GraphCounter:
    """A counter after the steps in which compilation is expected."""
    counter = GraphCounter()
    for _ in range(WARM_UP_STEPS + 2):
        counter.stepped()
    return counter


def test_counts_graph_compiled_after_first_steps(graph_counter):
    torch.compile(lambda x: x * 3 + 1, backend="eager")(torch.ones(3))
    assert graph_counter.recompilations == 1


def test_does_not_count_graphs_while_paused(graph_counter):
    function = torch.compile(lambda x: x * 2 + 1, backend="eager")
    with graph_counter.paused():
        function(torch.ones(3))
    assert graph_counter.recompilations == 0
