"""Parts of capabilities that a kind of subject has in its own form.

A capability is written once, for any subject. If a kind knows more than the interface
says, its own function takes the place of the capability's. Such functions are in the
package of the kind, and are imported when they are called.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, cast

PartName = Literal["searched settings", "windows", "training", "side", "network"]
"""Parts that a kind may have in its own form: the settings that ``tune --explore``
searches, the windows of its training, the training that ``confirm`` verifies, its side
of a comparison, and the measurement on several ranks."""
FunctionT = TypeVar("FunctionT", bound=Callable[..., object])

_MLM = "autotune.subjects.mlm"
PARTS_BY_KIND: Mapping[str, Mapping[PartName, str]] = {
    "mlm": {
        "searched settings": f"{_MLM}.search:explore_request",
        "windows": f"{_MLM}.workers.windows:windows_of_profile",
        "training": f"{_MLM}.confirm.training:training_of",
        "side": f"{_MLM}.baselines.side:side_of",
        "network": f"{_MLM}.network.stage:tune_network",
    }
}
"""Functions by kind and part, as ``module:function``."""


def part_of(kind: str, name: PartName, usual: FunctionT) -> FunctionT:
    """Return a part of a kind: its own function, or else the usual one.

    Args:
        kind: Kind of the subject.
        name: The part.
        usual: Function for any subject, with the same arguments and result.
    """
    own = PARTS_BY_KIND.get(kind, {}).get(name)
    if own is None:
        return usual
    module, _, function = own.partition(":")
    return cast(FunctionT, getattr(importlib.import_module(module), function))
