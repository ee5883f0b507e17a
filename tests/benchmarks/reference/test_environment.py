from benchmarks.reference.environment import explained, named_in_code, page


def test_every_variable_that_the_code_names_is_explained_and_no_other():
    assert set(named_in_code()) == set(explained())


def test_a_variable_says_what_it_means():
    assert "| `AUTOTUNE_DATA` | Directory of the dataset, where `--data` is not given. |" in page()
