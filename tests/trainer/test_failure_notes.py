"""Failure notes that ranks leave in torchrun's store."""

import pytest
from torch.distributed import TCPStore

from trainer.failure_notes import FailureNote, publish_failure, read_failure


@pytest.fixture
def torchrun():
    """A store such as torchrun's agent has, as environment variables for its ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    del store


def test_no_failure_note_before_a_failure(torchrun):
    assert read_failure(torchrun) is None


def test_failure_note_is_read_by_other_ranks(torchrun):
    publish_failure(torchrun, exit_code=3, reason="rank 1: no such dataset: “ä”")
    assert read_failure(torchrun) == FailureNote(
        exit_code=3, reason="rank 1: no such dataset: “ä”"
    )


def test_later_failure_note_replaces_earlier(torchrun):
    publish_failure(torchrun, exit_code=3, reason="rank 1: no such dataset")
    publish_failure(torchrun, exit_code=5, reason="rank 2: no GPU")
    note = FailureNote(exit_code=5, reason="rank 2: no GPU")
    assert read_failure(torchrun) == note


def test_failure_note_is_not_read_by_other_starts(torchrun):
    # The fixture is the environment of the first restart.
    publish_failure(torchrun, exit_code=5, reason="rank 2: no GPU")
    second_restart = torchrun | {"TORCHELASTIC_RESTART_COUNT": "2"}
    assert read_failure(second_restart) is None
    without_count = {
        name: value
        for name, value in torchrun.items()
        if name != "TORCHELASTIC_RESTART_COUNT"
    }
    assert read_failure(without_count) is None


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"TORCHELASTIC_USE_AGENT_STORE": "False"}, id="no agent's store"),
        pytest.param({"MASTER_PORT": "x"}, id="invalid port"),
    ],
)
def test_no_failure_note_without_a_store(torchrun, changes):
    environment = torchrun | changes
    publish_failure(environment, exit_code=3, reason="not stored")
    assert read_failure(environment) is None
    assert read_failure(torchrun) is None


def test_no_failure_note_without_torchrun():
    publish_failure({}, exit_code=3, reason="not stored")
    assert read_failure({}) is None
