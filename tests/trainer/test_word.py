import pytest
from torch.distributed import TCPStore

from trainer.word import leave_word, read_word


@pytest.fixture
def torchrun():
    """A store such as torchrun's agent keeps, and what it tells its ranks of it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": "1",
    }  # fmt: skip
    del store


def test_word_that_a_rank_left_is_read_by_another(torchrun):
    assert read_word(torchrun) is None
    leave_word(torchrun, 3, "rank 1: no such dataset: “ä”")
    assert read_word(torchrun) == (3, "rank 1: no such dataset: “ä”")
    leave_word(torchrun, 5, "rank 2: no GPU")
    assert read_word(torchrun) == (5, "rank 2: no GPU")


def test_word_of_an_earlier_start_of_the_ranks_is_not_read(torchrun):
    leave_word(torchrun, 3, "of the start before")
    assert read_word(torchrun | {"TORCHELASTIC_RESTART_COUNT": "2"}) is None
    assert read_word({key: value for key, value in torchrun.items() if "RESTART" not in key}) is None
    assert read_word(torchrun) is not None


@pytest.mark.parametrize(
    "changes", [{"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"TORCHELASTIC_USE_AGENT_STORE": ""}, {"MASTER_PORT": "x"}]
)
def test_where_no_torchrun_keeps_a_store_nothing_is_left_and_nothing_read(torchrun, changes):
    leave_word(torchrun | changes, 3, "to nobody")
    assert read_word(torchrun | changes) is None
    assert read_word(torchrun) is None
    leave_word({}, 3, "to nobody")
    assert read_word({}) is None
