"""Findings of the health checks have advice, and take the strongest action."""

import pytest

from trainer.health.findings import ADVICE, Action, Kind


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_likely_causes(kind):
    assert ADVICE[kind].causes


@pytest.mark.parametrize("kind", Kind)
def test_next_step_names_a_setting(kind):
    # You act on a finding by changing a setting of the trainer.
    assert "train." in ADVICE[kind].next_step


def test_actions_are_declared_from_the_mildest():
    # Of several findings in a step, the action that is declared last is taken.
    assert list(Action) == [Action.WARN, Action.SKIP, Action.ROLL_BACK, Action.GIVE_UP]
