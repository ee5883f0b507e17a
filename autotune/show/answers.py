"""What a command answers machines: its typed value as JSON. ``schemas`` describes the same types."""

import json

from pydantic_core import to_jsonable_python


def answer_json(answer: object) -> str:
    """One JSON value with the names of the fields, properties left out.

    Args:
        answer: A dataclass, a table, or a list or dictionary of these.
    """
    return json.dumps(to_jsonable_python(answer), indent=2)
