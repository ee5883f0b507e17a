"""Your own step is compared with its untuned settings, and with other profiles."""

import pytest

from autotune.baseline.stage import compare_profiles, compare_recipes
from autotune.errors import BadInput, NotCheckable
from autotune.profiles.store import read_profile
from tests.autotune.baseline.own_profiles import (
    DIRECTORY,
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


def test_compares_profiles_of_two_steps(tmp_path, monkeypatch):
    # The other profile's code is imported from the working directory.
    monkeypatch.chdir(DIRECTORY)
    with bench_of(own_code("build_sized_step")) as bench:
        other = write_own_profile(tmp_path / "other.toml", bench)
    with bench_of(own_code("build_step"), imports_in_trials=True) as bench:
        stored = write_own_profile(tmp_path / "own.toml", bench)
        request = request_in(tmp_path)
        compared = compare_profiles(bench, stored, [other], request, rounds=1)
        with pytest.raises(BadInput, match="same name"):
            compare_profiles(bench, stored, [other, other], request, rounds=1)
    assert [row.name for row in compared.rows] == ["other", "tuned"]
    assert compared.rows[0].speedup > 0
    assert compared.unit == "samples"
    assert read_profile(stored.path).profile.evidence.baseline is None


def test_compares_other_units_by_samples(tmp_path, monkeypatch):
    monkeypatch.chdir(DIRECTORY)
    images = own_code("build_sized_step", along="micro_batch_size", unit="images")
    rolls = own_code("build_step", unit="rolls", units_per_size=2.0)
    with bench_of(images) as bench:
        other = write_own_profile(tmp_path / "other.toml", bench)
    with bench_of(rolls, imports_in_trials=True) as bench:
        stored = write_own_profile(tmp_path / "own.toml", bench)
        compared = compare_profiles(
            bench, stored, [other], request_in(tmp_path), rounds=1
        )
    # Both sizes are numbers of samples.
    assert compared.unit == "samples"
