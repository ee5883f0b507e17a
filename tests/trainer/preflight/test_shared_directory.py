"""Run directories that all ranks must see, which rank 0 tests by a file."""

from collections.abc import Collection

import pytest

from tests.trainer.tiny_models import config_of
from trainer.formats.errors import BadConfig
from trainer.preflight.directory_checks import check_shared
from trainer.runtime.ranks import join_ranks

SINGLE_RANK = join_ranks(config_of(), environment={})
TOKEN_OF_RANK_0 = "0a0b"
"""Part of the name of the file by which rank 0 tests its directory."""


class PretendedRanks:
    """Ranks of a job, of which this process is rank 0 or the last one.

    Args:
        world_size: Number of ranks.
        blind_ranks: Other ranks than this one that do not see the file of rank 0.
        leads: True if this process is rank 0.
    """

    def __init__(
        self, world_size: int, *, blind_ranks: Collection[int] = (), leads: bool = True
    ) -> None:
        self.leads = leads
        self._own_rank = 0 if leads else world_size - 1
        self._misses = [float(rank in blind_ranks) for rank in range(world_size)]

    def broadcast_object(self, token):
        return token if self.leads else TOKEN_OF_RANK_0

    def all_reduce_sum(self, *values):
        return list(values)

    def all_gather_float(self, value):
        values = list(self._misses)
        values[self._own_rank] = value
        return values


ranks_that_miss_the_directory = pytest.mark.parametrize(
    ("ranks", "blind_ranks_text"),
    [
        pytest.param(PretendedRanks(2, blind_ranks={1}), "rank 1", id="the other rank"),
        pytest.param(
            PretendedRanks(4, blind_ranks={2, 3}), "ranks 2, 3", id="two of four"
        ),
        # The temporary directory of the test has no file of another rank 0.
        pytest.param(PretendedRanks(2, leads=False), "rank 1", id="this rank"),
        pytest.param(
            PretendedRanks(7, blind_ranks=range(1, 7)),
            "ranks 1, 2, 3, 4 and 2 more",
            id="many ranks",
        ),
    ],
)


@ranks_that_miss_the_directory
def test_rejects_directory_that_ranks_must_see(tmp_path, ranks, blind_ranks_text):
    with pytest.raises(
        BadConfig, match=f"not found on {blind_ranks_text}, but all ranks write"
    ) as raised:
        check_shared(tmp_path, ranks, needed=True)
    assert "--out" in raised.value.next_step
    assert list(tmp_path.iterdir()) == []


@ranks_that_miss_the_directory
def test_warns_of_directory_that_ranks_miss(tmp_path, ranks, blind_ranks_text):
    (warning,) = check_shared(tmp_path, ranks, needed=False)
    assert (
        f"not found on {blind_ranks_text}: they cannot record their exit in exit.json"
        in warning.message
    )
    assert "--out" in warning.next_step
    assert list(tmp_path.iterdir()) == []


def test_error_has_the_next_step_of_the_warning(tmp_path):
    ranks = PretendedRanks(2, blind_ranks={1})
    (warning,) = check_shared(tmp_path, ranks, needed=False)
    with pytest.raises(BadConfig) as raised:
        check_shared(tmp_path, ranks, needed=True)
    assert raised.value.next_step == warning.next_step


@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(SINGLE_RANK, id="one rank"),
        pytest.param(PretendedRanks(3), id="several ranks"),
    ],
)
def test_accepts_shared_directory(tmp_path, ranks, needed):
    assert check_shared(tmp_path, ranks, needed=needed) == []
    assert list(tmp_path.iterdir()) == []


def test_accepts_directory_with_the_file_of_rank_0(tmp_path):
    (tmp_path / f".seen-by-all-ranks.{TOKEN_OF_RANK_0}").touch()
    ranks = PretendedRanks(2, leads=False)
    assert check_shared(tmp_path, ranks, needed=True) == []
