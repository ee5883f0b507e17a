import pytest

from autotune.core.interval import NOT_ENOUGH
from autotune.show.report.before import before_after
from autotune.show.report.document import Chart, Table
from tests.autotune.show.report.example import example_profile
from tests.autotune.show.report.examples import reported


def block_of(rates):
    """The first block, if the tuned settings were read at these rates."""
    profile = example_profile("d")
    baseline = profile.evidence.baseline
    rows = [
        row.model_copy(update={"real_tokens_per_s": rates}) if row.name == "tuned" else row for row in baseline.rows
    ]
    evidence = profile.evidence.model_copy(update={"baseline": baseline.model_copy(update={"rows": rows})})
    return before_after(reported(profile=profile.model_copy(update={"evidence": evidence})))[0]


@pytest.mark.parametrize("rates", [[1000.0, 2800.0, 7700.0], [2800.0, 2810.0], [2800.0]])
def test_windows_that_say_too_little_get_no_bar_and_say_so(rates):
    enough, block = block_of([2700.0, 2800.0, 2900.0]), block_of(rates)
    assert isinstance(enough, Chart)
    assert enough.drawing.bars[-1].low > 2000
    assert isinstance(block, Table | Chart)
    table = block if isinstance(block, Table) else block.table
    assert next(row for row in table.rows if row[0] == "tuned")[2] == NOT_ENOUGH
    assert isinstance(block, Table) or "tuned" not in {bar.label for bar in block.drawing.bars}
