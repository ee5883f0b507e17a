"""Arguments of a class that a choice of settings replaces while your code runs."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer.formats.errors import BadConfig


@contextlib.contextmanager
def overridden(made_class: type, settings: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Replace arguments with which your code makes objects of a class.

    Only the process of a trial does this. It is the one way to vary, for example, the
    precision of a ``Trainer``, which it takes from its arguments when it is made.

    Args:
        made_class: The class, such as ``TrainingArguments``.
        settings: Arguments to replace, by name.

    Yields:
        The objects that were made, in their order.
    """
    made: list[Any] = []
    restore = override(made_class, lambda given: settings, made.append)
    try:
        yield made
    finally:
        restore()


def override(
    made_class: type,
    settings_for: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    when_made: Callable[[Any], object] = lambda instance: None,
) -> Callable[[], None]:
    """Replace arguments of a class from now on; return the function that ends it.

    Args:
        made_class: The class.
        settings_for: Returns the arguments to replace, from the given arguments by
            name.
        when_made: Called with each object that was made.
    """
    make = made_class.__init__  # type: ignore[misc]  # of this class, not an instance
    signature = inspect.signature(make)

    # Libraries read the signature of ``__init__``.
    @functools.wraps(make)
    def init(instance: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(instance, *args, **kwargs).arguments
        make(instance, *args, **{**kwargs, **settings_for(given)})
        when_made(instance)

    made_class.__init__ = init  # type: ignore[misc]

    def restore() -> None:
        made_class.__init__ = make  # type: ignore[misc]

    return restore


def require_made(made: list[Any], made_class: type, function: str) -> None:
    """Check that a function has made an object of a class.

    Raises:
        BadConfig: If it has not, so that the settings have no effect.
    """
    if not made:
        raise BadConfig(
            f"{function} makes no {made_class.__name__}, so its settings cannot be"
            " varied",
            next_step=(
                f"Make {made_class.__name__} in that function, not when its module is"
                " imported."
            ),
        )
