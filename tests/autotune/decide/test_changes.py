from hypothesis import given
from hypothesis import strategies as st

from autotune.decide.changes import Change, flat_settings, flat_table, profile_changes, setting_changes
from tests.autotune.profiles import example_profile


def test_a_profile_does_not_differ_from_itself():
    changes = profile_changes(example_profile(), example_profile())
    assert changes.train == changes.constraints == changes.fingerprint == changes.evidence == ()


def test_settings_differ_by_their_dotted_keys_and_the_models_config_key_by_key():
    old = example_profile()
    model = old.train.model.model_copy(update={"config": {"model_type": "bert", "hidden_size": 128, "new": 1}})
    new = old.model_copy(update={"train": old.train.model_copy(update={"model": model, "tf32": False})})
    assert profile_changes(old, new).train == (
        Change(key="model.config.hidden_size", old=64, new=128),
        Change(key="tf32", old=True, new=False),
        Change(key="model.config.new", old=None, new=1),
    )


def test_rows_are_held_against_rows_of_the_same_name_and_readings_by_their_median():
    old = example_profile()
    workers = old.evidence.workers
    turned = workers.model_copy(
        update={"rows": [workers.rows[1].model_copy(update={"slot_tokens_per_s": [200.0, 202.0]}), workers.rows[0]]}
    )
    new = old.model_copy(update={"evidence": old.evidence.model_copy(update={"workers": turned})})
    (change,) = profile_changes(old, new).evidence
    assert change.key == "workers.rows[loader_workers=1].slot_tokens_per_s (median)"
    assert (change.old, change.new, change.ratio) == (100.0, 201.0, 2.01)


def test_what_only_one_side_has_is_one_change():
    old = example_profile()
    probe = old.evidence.probe.model_copy(update={"curve": old.evidence.probe.curve[:1]})
    new = old.model_copy(update={"evidence": old.evidence.model_copy(update={"workers": None, "probe": probe})})
    assert profile_changes(old, new).evidence == (
        Change(key="workers", old="measured", new=None),
        Change(key="probe.curve[rows=2]", old="measured", new=None),
    )


values = st.one_of(st.none(), st.booleans(), st.integers(), st.text())


@given(st.dictionaries(st.text(), values), st.dictionaries(st.text(), values))
def test_both_directions_see_the_same_differences(old, new):
    forward = {(change.key, change.old, change.new) for change in setting_changes(old, new)}
    assert forward == {(change.key, change.new, change.old) for change in setting_changes(new, old)}
    assert {key for key, _, _ in forward} == {key for key in old | new if old.get(key) != new.get(key)}


def test_a_ratio_is_of_figures_only():
    assert Change(key="a", old=2, new=3).ratio == 1.5
    assert Change(key="a", old=True, new=3).ratio is None
    assert Change(key="a", old=0, new=3).ratio is None
    assert Change(key="a", old="x", new=3).ratio is None


def test_settings_are_flat():
    assert flat_settings(example_profile().train)["data.loader_workers"] == 1


def test_a_table_that_is_nested_without_end_is_cut():
    table: dict = {}
    for _ in range(900):
        table = {"a": table}
    assert list(flat_table(table).values()) == ["nested too deep"]
