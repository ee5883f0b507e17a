import pytest

from benchmarks.bars import Bar, exit_code, lines


def _bar(figure, direction="<=", bar=0.5):
    return Bar(name="x_s", figure=figure, unit="s", bar=bar, direction=direction)


@pytest.mark.parametrize(
    ("figure", "direction", "holds"),
    [(0.5, "<=", True), (0.51, "<=", False), (0.5, ">=", True), (0.49, ">=", False), (None, "<=", None)],
)
def test_a_bar_holds_up_to_its_limit(figure, direction, holds):
    assert _bar(figure, direction).holds is holds


def test_each_bar_is_one_line_that_a_script_can_find():
    assert lines([_bar(0.31), _bar(0.9), _bar(None)]).splitlines() == [
        "x_s figure=0.31 bar<=0.5 ok",
        "x_s figure=0.9 bar<=0.5 short",
        "x_s figure=n/a bar<=0.5 not measured",
    ]


@pytest.mark.parametrize(
    ("figures", "code"), [([0.1, 0.2], 0), ([0.1, 0.9], 1), ([0.1, None], 2), ([0.9, None], 1), ([], 2)]
)
def test_the_exit_code_tells_held_short_and_unmeasured_apart(figures, code):
    assert exit_code([_bar(figure) for figure in figures]) == code
