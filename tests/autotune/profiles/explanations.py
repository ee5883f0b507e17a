"""Explanations of single settings, for tests."""

from autotune.profiles.decide.explain import (
    Explanation,
    explanations,
    select_explanations,
)
from autotune.profiles.values import Profile


def explain(profile: Profile, key: str) -> Explanation:
    """Return the explanation of the only setting with this key."""
    (explanation,) = select_explanations(explanations(profile), key)
    return explanation
