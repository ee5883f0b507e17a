"""The ``untuned`` job: settings of size and loader without tuning."""

from typing import Any

from autotune.baseline.values import UntunedRequest
from autotune.subjects.jobs import load


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Call the function of the subject that tells them.

    Args:
        measured: An ``UntunedRequest``.
        local: The ``directory`` to import from, and the trial's time limit ``limit_s``.

    Returns:
        ``settings``: values by name, None if one is not known.

    Raises:
        BadConfig: If your code cannot be imported, or makes no trainer.
    """
    request = UntunedRequest.of(measured)
    directory = local["directory"]
    load.write_stack_after(local["limit_s"])
    load.enter(directory)
    tell = load.resolve(request.call.function, directory)
    settings = tell(
        **request.call.arguments, **load.named(tell, {"directory": directory})
    )
    return {
        "settings": {
            name: value
            for name, value in settings.items()
            if value is None or isinstance(value, bool | int | float | str)
        }
    }
