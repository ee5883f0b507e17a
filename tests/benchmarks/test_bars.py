import pytest

from benchmarks.bars import Bar, exit_code, lines


def bar(figure: float | None, direction: str = "<=") -> Bar:
    return Bar(name="cli_help_s", figure=figure, unit="s", bar=0.5, direction=direction)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("figure", "direction", "line"),
    [
        (0.31, "<=", "cli_help_s figure=0.31 bar<=0.5 ok"),
        (0.5, "<=", "cli_help_s figure=0.5 bar<=0.5 ok"),
        (0.62, "<=", "cli_help_s figure=0.62 bar<=0.5 short"),
        (4.31, ">=", "cli_help_s figure=4.31 bar>=0.5 ok"),
        (0.5, ">=", "cli_help_s figure=0.5 bar>=0.5 ok"),
        (0.4, ">=", "cli_help_s figure=0.4 bar>=0.5 short"),
        (None, "<=", "cli_help_s figure=n/a bar<=0.5 not measured"),
    ],
)
def test_a_bar_is_one_line_with_its_verdict(figure, direction, line):
    assert bar(figure, direction).line == line


@pytest.mark.parametrize(
    ("figures", "code"),
    [([0.1], 0), ([0.1, 0.2], 0), ([0.1, 0.9], 1), ([0.1, None], 2), ([None, 0.9], 1), ([], 2)],
)
def test_exit_code_is_the_worst_of_the_bars(figures, code):
    assert exit_code([bar(figure) for figure in figures]) == code


def test_every_bar_has_its_own_line_and_json_says_whether_it_holds():
    assert lines([bar(0.1), bar(0.9)]).splitlines() == [bar(0.1).line, bar(0.9).line]
    same = {"name": "cli_help_s", "figure": 0.9, "unit": "s", "bar": 0.5, "direction": "<="}
    assert bar(0.9).to_json() == same | {"holds": False}
