import pytest

from autotune.show.dealing import dealing_words
from tests.autotune.profiles import example_profile


@pytest.mark.parametrize(
    ("rows", "micro", "ranks", "words"),
    [
        (32, 8, 1, "a global batch of 32 rows is 4 micro-batches of 8 rows"),
        (1, 8, 1, "a global batch of 1 row is 1 micro-batch of 1 row"),
        (256, 403, 2, "a global batch of 256 rows is 1 micro-batch of 128 rows on each of 2 ranks"),
        (32, 15, 1, "3 micro-batches of 11 rows, 1 row of them empty; none would be with 30 or 33 rows"),
    ],
)
def test_a_global_batch_is_said_as_it_is_dealt(rows, micro, ranks, words):
    train = example_profile().train.model_copy(update={"global_batch_rows": rows, "micro_batch_rows": micro})
    assert words in dealing_words(train, ranks)
