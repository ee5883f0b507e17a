"""Failure notes that ranks leave in torchrun's store."""

import pytest
from torch.distributed import TCPStore

from trainer.failure_notes import publish_failure, read_failure


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


def test_failure_note_is_read_by_other_ranks(torchrun):
    assert read_failure(torchrun) is None
    # The second one replaces the first.
    for note in ((3, "rank 1: no such dataset: “ä”"), (5, "rank 2: no GPU")):
        publish_failure(torchrun, *note)
        assert read_failure(torchrun) == note


def test_failure_note_is_not_read_by_other_starts(torchrun):
    publish_failure(torchrun, 5, "rank 2: no GPU")
    assert read_failure(torchrun | {"TORCHELASTIC_RESTART_COUNT": "2"}) is None
    del torchrun["TORCHELASTIC_RESTART_COUNT"]
    assert read_failure(torchrun) is None


@pytest.mark.parametrize(
    ("key", "value"), [("TORCHELASTIC_USE_AGENT_STORE", "False"), ("MASTER_PORT", "x")]
)
def test_no_failure_note_without_a_store(torchrun, key, value):
    for environment in (torchrun | {key: value}, {}):
        publish_failure(environment, 3, "for nobody")
        assert read_failure(environment) is None
    assert read_failure(torchrun) is None
