"""The check that no two ranks train on the same sample in a step."""

import numpy as np
import pytest

from trainer.data.loader import check_no_shared_samples
from trainer.formats.errors import BadConfig


def test_accepts_ranks_without_shared_samples():
    no_samples = np.array([], dtype=np.int64)
    check_no_shared_samples([np.array([1, 2]), no_samples, np.array([3, 4])])


def test_accepts_job_without_ranks():
    check_no_shared_samples([])


@pytest.mark.parametrize(
    ("samples_by_rank", "message"),
    [
        pytest.param(
            [[9], [1, 2, 3], [3, 4, 2]],
            "ranks 1 and 2 received 2 samples in common",
            id="two ranks",
        ),
        pytest.param([[9], [1, 1]], "a rank received a sample twice", id="one rank"),
    ],
)
def test_rejects_shared_samples(samples_by_rank, message):
    with pytest.raises(BadConfig, match=message):
        check_no_shared_samples([np.array(samples) for samples in samples_by_rank])
