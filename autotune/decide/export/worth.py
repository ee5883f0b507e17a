"""What a setting that gets lost in an export was worth, as far as the profile's own figures tell. Pure."""

from collections.abc import Sequence

from autotune.core.advice import Figure
from autotune.core.evidence import RecipeRow
from autotune.core.profile import Profile
from autotune.decide.resampling import CONFIDENCE
from autotune.decide.statistics import SHOWN_CONFIDENCE

_ADAM_BYTES, _GRADIENT_BYTES = 8, 4
"""Of a parameter in fp32: two moments; its gradient."""


def worth_of(profile: Profile, keys: Sequence[str]) -> tuple[Figure, ...]:
    """Real tokens/s with the profile's value of these settings, over what the trainer's other ways took.

    Args:
        profile: With or without such figures.
        keys: Dotted keys under ``[train]``.
    """
    return (*_by_recipe(profile, keys), *_by_exploring(profile, keys))


def worth_of_exchange(profile: Profile) -> tuple[Figure, ...]:
    """Real tokens/s with the profile's exchange of gradients over the default one."""
    network, parallel = profile.evidence.network, profile.train.parallel
    rows = [] if network is None else network.exchanges
    for row in rows:
        same = (row.strategy, row.gradient_dtype, row.shard_ranks) == (
            parallel.strategy, parallel.gradient_dtype, parallel.shard_ranks,
        )  # fmt: skip
        if same and row.bucket_cap_mib == parallel.bucket_cap_mib and row.ratio_to_default is not None:
            figure = Figure(
                name="real tokens/s over the default exchange, settings of parallel together",
                value=row.ratio_to_default, unit="ratio", low=row.ratio_low, high=row.ratio_high,
                confidence=CONFIDENCE, source="autotune network",
            )  # fmt: skip
            return (figure,)
    return ()


def whole_optimizer(profile: Profile, ranks: int) -> tuple[Figure, ...]:
    """Bytes that each rank holds more when the optimizer's state is not shared out; empty where nobody counted."""
    return () if ranks == 1 else _more_memory(profile, _ADAM_BYTES * (1 - 1 / ranks), f"two moments on {ranks} ranks")


def gradients_twice(profile: Profile) -> tuple[Figure, ...]:
    """Bytes that each rank holds more when gradients lie in DDP's buckets and outside; empty where nobody counted."""
    return _more_memory(profile, _GRADIENT_BYTES, "a second gradient")


def _more_memory(profile: Profile, bytes_per_parameter: float, what: str) -> tuple[Figure, ...]:
    parameters = profile.parameters
    if parameters is None:
        return ()
    figure = Figure(
        name="memory of each rank that it saves", value=bytes_per_parameter * parameters, unit="bytes",
        known="predicted", source=f"{what}, in fp32, of {parameters:,} parameters",
    )  # fmt: skip
    return (figure,)


def _by_recipe(profile: Profile, keys: Sequence[str]) -> tuple[Figure, ...]:
    """Against the recipe that has these settings otherwise, and the least else."""
    baseline = profile.evidence.baseline
    found: list[tuple[RecipeRow, list[str]]] = []
    for row in baseline.rows if baseline is not None else []:
        differ = [difference.partition(":")[0] for difference in row.differences]
        if row.ratio_to_tuned is not None and any(key in differ for key in keys):
            found.append((row, differ))
    if not found:
        return ()
    row, differ = min(found, key=lambda one: len(one[1]))
    assert row.ratio_to_tuned is not None
    figure = Figure(
        name=f"real tokens/s over the {row.name} recipe, which differs in {', '.join(differ)}",
        value=1 / row.ratio_to_tuned,
        unit="ratio",
        low=None if not row.ratio_high else 1 / row.ratio_high,
        high=None if not row.ratio_low else 1 / row.ratio_low,
        confidence=SHOWN_CONFIDENCE,
        n=len(row.real_tokens_per_s),
        source="autotune baseline",
    )
    return (figure,)


def _by_exploring(profile: Profile, keys: Sequence[str]) -> tuple[Figure, ...]:
    explored = profile.evidence.explore
    return tuple(
        Figure(
            name=f"real tokens/s of {effect.knob} = {effect.chosen} over {effect.unexplored}",
            value=effect.ratio, unit="ratio", low=effect.ratio_low, high=effect.ratio_high,
            confidence=SHOWN_CONFIDENCE, known="predicted", source="autotune tune --explore, as modelled",
        )
        for effect in (explored.knobs if explored is not None else [])
        if effect.knob in keys and effect.ratio is not None
    )  # fmt: skip
