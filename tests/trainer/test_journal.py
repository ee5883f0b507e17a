import errno
import importlib.util

from tests.trainer.checkpoints import header_of
from tests.trainer.rows import evaluation_of, event_of, row_of
from trainer.events import EventRow
from trainer.journal import Journal
from trainer.record import TENSORBOARD_DIRECTORY, read_run
from trainer.writer import RunWriter


class _Screen:
    def __init__(self) -> None:
        self.seen = []

    def begin(self, header) -> None:
        self.seen.append(header)

    def step(self, row) -> None:
        self.seen.append(row)

    def evaluation(self, row) -> None:
        self.seen.append(row)

    def event(self, row) -> None:
        self.seen.append(row)


def _written(directory, *, active: bool) -> _Screen:
    screen = _Screen()
    journal = Journal(RunWriter(directory, active=active), screen, header_of(), active=active)
    journal.steps(iter([row_of(1), row_of(2, loss=None)]))
    journal.evaluation(evaluation_of(2))
    journal.event(event_of(2))
    journal.close()
    return screen


def test_rows_reach_the_record_the_screen_and_tensorboard(tmp_path):
    screen = _written(tmp_path / "r", active=True)
    assert screen.seen == [header_of(), row_of(1), row_of(2, loss=None), evaluation_of(2), event_of(2)]
    run = read_run(tmp_path / "r")
    assert (run.steps, run.evaluations) == ((row_of(1), row_of(2, loss=None)), (evaluation_of(2),))
    assert run.events == (event_of(2),)
    assert importlib.util.find_spec("tensorboard")
    assert list((tmp_path / "r" / TENSORBOARD_DIRECTORY).iterdir())


def test_other_ranks_write_and_show_nothing(tmp_path):
    assert _written(tmp_path / "r", active=False).seen == []
    assert not (tmp_path / "r").exists()


def test_a_later_start_hides_what_tensorboard_drew_of_steps_that_are_taken_again(tmp_path, monkeypatch):
    import torch.utils.tensorboard

    asked = []
    monkeypatch.setattr(torch.utils.tensorboard, "SummaryWriter", lambda **options: asked.append(options))
    for attempt, step in ((1, 0), (2, 5)):
        header = header_of(attempt=attempt, resumed_step=step)
        Journal(RunWriter(tmp_path / str(attempt), active=True), _Screen(), header, active=True)
    assert [options["purge_step"] for options in asked] == [None, 6]


def test_a_record_that_cannot_be_written_is_said_once_and_again_when_it_happens_again(tmp_path, monkeypatch):
    writer, screen = RunWriter(tmp_path / "r", active=True), _Screen()
    journal = Journal(writer, screen, header_of(), active=True)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for begin in (1, 11):
        with monkeypatch.context() as patch:
            patch.setattr("trainer.writer._append_whole", full)
            journal.steps(map(row_of, range(begin, begin + 3)))
        journal.steps([row_of(begin + 3)])
    told = [row for row in screen.seen if isinstance(row, EventRow)]
    assert [(row.kind, row.step) for row in told] == [("record_waits", 1), ("record_waits", 11)]
    assert "No space left on device" in told[0].message
    assert len(read_run(tmp_path / "r").steps) == 8
