"""What the trainer's settings mean: the words that stand beside them in its own source, and nowhere else."""

import ast
import functools
import inspect
import itertools
import textwrap

from trainer.config import TrainConfig
from trainer.schema import Table


@functools.cache
def setting_meanings() -> dict[str, str]:
    """The text under each setting of the schema, by dotted key.

    Empty where the sources are not installed, and without those that need no words.
    """
    return _meanings(TrainConfig, "")


def _meanings(kind: type[Table], prefix: str) -> dict[str, str]:
    found = {f"{prefix}{name}": text for name, text in texts_of(kind).items() if name in kind.model_fields}
    for name, known in kind.model_fields.items():
        if isinstance(known.annotation, type) and issubclass(known.annotation, Table):
            found |= _meanings(known.annotation, f"{prefix}{name}.")
    return found


def texts_of(kind: type) -> dict[str, str]:
    """The string that follows each annotated name of a class body."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except OSError:
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found: dict[str, str] = {}
    for field, after in itertools.pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            found[field.target.id] = " ".join(after.value.value.split())
    return found
