"""The unit in which subjects are compared. Pure."""

from collections.abc import Mapping

from autotune.errors import BadInput


def common_unit(rates_by_name: Mapping[str, Mapping[str, float]]) -> str:
    """Return a unit in which all subjects count their work; samples if no other.

    Args:
        rates_by_name: Rates by unit, of each subject by its name.

    Raises:
        BadInput: If there is no such unit.
    """
    first, *others = rates_by_name.values()
    for unit in sorted(first, key=lambda unit: unit == "samples"):
        if all(unit in rates for rates in others):
            return unit
    counted = "; ".join(
        f"{name} counts {' and '.join(sorted(rates))}"
        for name, rates in rates_by_name.items()
    )
    raise BadInput(
        f"the subjects have no unit in common: {counted}",
        next_step=(
            "Probe one of them again in the other's unit, such as --per-size"
            " 512tokens; or let its loader count its work, as docs/your-code.md shows."
        ),
    )
