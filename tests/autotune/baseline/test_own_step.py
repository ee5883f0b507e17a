"""Your own step is compared with its untuned settings, and with other profiles."""

import pytest

from autotune.baseline.stage import compare_recipes
from autotune.errors import NotCheckable
from autotune.profiles.store import read_profile
from tests.autotune.baseline.own_profiles import (
    TUNED_SIZE,
    bench_of,
    own_code,
    request_in,
    write_own_profile,
)


def test_compares_with_defaults_of_the_functions(tmp_path):
    path = tmp_path / "own.toml"
    with bench_of(own_code("build_step", loader=True)) as bench:
        stored = write_own_profile(path, bench, num_workers=1)
        compared = compare_recipes(bench, stored, request_in(tmp_path), rounds=1)
    untuned, tuned = compared.rows
    assert (untuned.name, tuned.name) == ("untuned", "tuned")
    differences = {row.key: (row.theirs, row.tuned) for row in untuned.differences}
    assert differences["micro_batch_size"] == (2, TUNED_SIZE)
    assert differences["num_workers"] == (0, 1)
    assert compared.unit == "samples"
    assert untuned.outcome == tuned.outcome == "ran"
    rate = tuned.units_per_s[0] / untuned.units_per_s[0]
    assert untuned.speedup == pytest.approx(rate)
    assert read_profile(path).profile.evidence.baseline == compared


def test_size_without_default_must_be_named(tmp_path):
    path = tmp_path / "own.toml"
    with bench_of(own_code("build_sized_step")) as bench:
        stored = write_own_profile(path, bench)
        request = request_in(tmp_path)
        with pytest.raises(
            NotCheckable, match="no default for micro_batch_size"
        ) as told:
            compare_recipes(bench, stored, request, rounds=1)
        assert "--untuned micro_batch_size=N" in told.value.next_step
        compared = compare_recipes(
            bench, stored, request, rounds=1, untuned={"micro_batch_size": 4}
        )
    (difference,) = compared.rows[0].differences
    assert (difference.theirs, difference.tuned) == (4, TUNED_SIZE)
