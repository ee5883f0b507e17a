from trainer.health.findings import ADVICE, Action, Kind


def test_every_kind_has_advice():
    assert set(ADVICE) == set(Kind)
    for advice in ADVICE.values():
        assert advice.causes
        assert "train." in advice.next_step


def test_actions_are_ordered_by_severity():
    assert list(Action) == [Action.WARN, Action.SKIP, Action.ROLL_BACK, Action.GIVE_UP]
