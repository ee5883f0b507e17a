import importlib.util

from tests.trainer.test_record import _evaluation, _header, _row
from trainer.journal import Journal
from trainer.record import TENSORBOARD_DIRECTORY, RunWriter, read_run


class _Screen:
    def __init__(self) -> None:
        self.seen = []

    def begin(self, header) -> None:
        self.seen.append(header)

    def step(self, row) -> None:
        self.seen.append(row)

    def evaluation(self, row) -> None:
        self.seen.append(row)


def _written(directory, *, active: bool) -> _Screen:
    screen = _Screen()
    journal = Journal(RunWriter(directory, active=active), screen, _header(), active=active)
    journal.steps(iter([_row(1), _row(2)]))
    journal.evaluation(_evaluation(2))
    journal.close()
    return screen


def test_rows_reach_the_record_the_screen_and_tensorboard(tmp_path):
    screen = _written(tmp_path / "r", active=True)
    assert screen.seen == [_header(), _row(1), _row(2), _evaluation(2)]
    run = read_run(tmp_path / "r")
    assert (run.steps, run.evaluations) == ((_row(1), _row(2)), (_evaluation(2),))
    assert importlib.util.find_spec("tensorboard")
    assert list((tmp_path / "r" / TENSORBOARD_DIRECTORY).iterdir())


def test_other_ranks_write_and_show_nothing(tmp_path):
    assert _written(tmp_path / "r", active=False).seen == []
    assert not (tmp_path / "r").exists()
