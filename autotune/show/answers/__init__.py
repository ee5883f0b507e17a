"""What commands answer machines: one typed value for each, whose fields are the keys of its JSON."""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def answer_json(answer: object) -> str:
    """One JSON value with the names of the fields, properties left out.

    Args:
        answer: A dataclass, a table, or a list or dictionary of these.
    """
    return json.dumps(plain(answer), indent=2)


def plain(answer: object) -> Any:  # noqa: ANN401 - any JSON value
    """The same as dictionaries, lists and scalars."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(answer)


def fields_of(value: "DataclassInstance", but: Callable[[str], bool] = lambda _: False) -> dict[str, Any]:
    """The fields of a dataclass as they are, for an answer that has the same and more.

    Args:
        value: The dataclass.
        but: Names that are left out.
    """
    return {field.name: getattr(value, field.name) for field in fields(value) if not but(field.name)}
