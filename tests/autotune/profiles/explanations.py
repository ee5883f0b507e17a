"""Explanations of single settings, for tests."""

from autotune.evidence.profile import Profile
from autotune.profiles.decide.explain import (
    Explanation,
    explanations,
    select_explanations,
)


def explain(profile: Profile, key: str) -> Explanation:
    """Return the explanation of the only setting with this key."""
    (explanation,) = select_explanations(explanations(profile), key)
    return explanation
