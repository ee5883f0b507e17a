"""Requirements of optional settings. No torch here."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from trainer.formats.errors import BadConfig
from trainer.formats.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Condition under which an optional setting can be used."""

    is_fulfilled: bool
    reason: str
    """Predicate that tells why the setting fails otherwise, such as ``requires a
    GPU``; messages put it after the key of the setting."""
    setting: str | None = None
    """Setting in ``train`` that fulfils the condition, as ``key=value``, if any."""


def on_gpu(config: TrainConfig) -> Condition:
    """Return the condition that the model is on a GPU."""
    return Condition(is_fulfilled=config.device == "cuda", reason="requires a GPU")


def in_bf16(config: TrainConfig) -> Condition:
    """Return the condition that matmuls are computed in bf16."""
    return Condition(
        is_fulfilled=config.precision == "bf16",
        reason="requires bf16",
        setting="precision=bf16",
    )


def without_fsdp2(config: TrainConfig) -> Condition:
    """Return the condition that the weights are not sharded by fsdp2.

    It shards and gathers them itself, in bf16 and without working copies.
    """
    return Condition(
        is_fulfilled=config.parallel.strategy != "fsdp2",
        reason="cannot be used with fsdp2",
        setting="parallel.strategy=zero1",
    )


def with_working_copies(config: TrainConfig, *, has_copies: bool) -> Condition:
    """Return the condition that linear layers have working copies."""
    model_type = config.model.config["model_type"]
    return Condition(
        is_fulfilled=has_copies,
        reason=f"cannot be used with {model_type!r}, which has no working copies",
    )


def require(
    key: str,
    conditions: Iterable[Condition],
    *,
    off: str,
    library: str | None = None,
    extra: str = "",
) -> None:
    """Check that a setting can be used.

    Args:
        key: Key of the setting in ``train``.
        conditions: Conditions that must be fulfilled.
        off: Value that turns the setting off.
        library: Package that the setting requires, if any.
        extra: Extra of this project that installs the package.

    Raises:
        BadConfig: If a condition is not fulfilled, or the package is not installed.
    """
    for condition in conditions:
        if not condition.is_fulfilled:
            raise BadConfig(
                f"train.{key} {condition.reason}",
                next_step=_next_step(condition, f"{key}={off}"),
            )
    if library is not None and find_spec(library) is None:
        raise BadConfig(
            f"train.{key} requires {library}",
            next_step=f"Install it: pip install '.[{extra}]'",
        )


def _next_step(condition: Condition, setting_off: str) -> str:
    if condition.setting is None:
        return f"Use --set train.{setting_off}"
    return f"Use --set train.{condition.setting} or --set train.{setting_off}"
