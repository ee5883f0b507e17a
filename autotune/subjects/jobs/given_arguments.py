"""Arguments that you give, divided between your function and its library."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from autotune.subjects.jobs.load import named_parameters, parameters_of
from trainer.formats.errors import BadConfig


def divide_arguments(
    make: Callable[..., Any],
    name: str,
    arguments: Mapping[str, Any],
    library_settings: Collection[str],
    library: str,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide arguments between a function of yours and the library that it uses.

    An argument is the function's if the function names it, else a setting of the
    library if there is one of this name, else the function's if it takes any.

    Args:
        make: The function.
        name: Its name, for messages.
        arguments: Its fixed arguments: those of ``--set``.
        library_settings: Names of the library's settings.
        library: Name of the class that takes these settings, for messages.

    Returns:
        The arguments of the function, and the settings of the library.

    Raises:
        BadConfig: If neither takes an argument.
    """
    named = named_parameters(make)
    takes_any = parameters_of(make) is None
    for_function: dict[str, Any] = {}
    for_library: dict[str, Any] = {}
    for argument, value in arguments.items():
        if argument in named:
            for_function[argument] = value
        elif argument in library_settings:
            for_library[argument] = value
        elif takes_any:
            for_function[argument] = value
        else:
            raise BadConfig(
                f"neither {name} nor {library} takes {argument}",
                next_step=(
                    f"Use an argument of the function ({', '.join(sorted(named))}), or"
                    f" a setting of {library}."
                    if named
                    else f"Use a setting of {library}; the function takes none."
                ),
            )
    return for_function, for_library
