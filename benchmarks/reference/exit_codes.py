"""Every exit code, from the errors that own them."""

from collections import defaultdict
from collections.abc import Iterator
from typing import TypeVar

from autotune.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, AutotuneError
from benchmarks.reference.markdown import code, table
from trainer.errors import TrainerError

_Error = TypeVar("_Error", AutotuneError, TrainerError)
_INTRODUCTION = """\
# Exit codes

Written by `make figures` from `autotune/errors.py` and `trainer/errors.py`. For every code but 0 a message on standard
error says what happened, with the value that caused it, and what to do next.

"""
_CLOSING = """
`torchrun` returns 1 whatever its ranks return; the trainer's code and reason are in the run's `exit.json`, and
`autotune launch local` exits with it. `--wait` exits with the job's own code.
"""
_NOTES = {
    0: "done",
    4: "or more loader workers are asked for than memory holds",
    7: "of `estimate`: the model can only be run",
    8: "one of the trials crashed, was late, or was disturbed by somebody else. A worker count that noise leaves "
    "undecided is an answer: 0",
    9: "of `report compare --fail-if-slower`",
    75: "of training also: it has saved its state, as it was told to leave",
    EXIT_INTERRUPTED: "Ctrl-C; finished work is saved, and the same command goes on. In training: 75. While waiting "
    "for a job: the job goes on",
    EXIT_TERMINATED: "SIGTERM; the same. Of `--wait`: somebody cancelled the job",
}
"""What the errors themselves do not say, by code."""


def page() -> str:
    """Each code once, with the errors of the tuner and the trainer that end with it."""
    owners: dict[int, list[type[AutotuneError | TrainerError]]] = defaultdict(list)
    for kind in _below(AutotuneError):
        owners[kind.exit_code].append(kind)
    for other in _below(TrainerError):
        owners[other.exit_code].append(other)
    rows = []
    for number in sorted({*owners, *_NOTES}):
        kinds = owners[number]
        said = dict.fromkeys((kind.__doc__ or "").strip() for kind in kinds)
        meaning = " ".join(said) + (" " if kinds and number in _NOTES else "")
        if number in _NOTES:
            note = _NOTES[number]
            meaning += f"{note[0].upper()}{note[1:]}."
        errors = ", ".join(dict.fromkeys(code(f"{kind.__module__}.{kind.__name__}") for kind in kinds))
        rows.append((str(number), meaning, errors))
    return _INTRODUCTION + table(("code", "meaning", "errors"), rows) + _CLOSING


def _below(kind: type[_Error]) -> Iterator[type[_Error]]:
    for one in kind.__subclasses__():
        if one.__module__ == kind.__module__:
            yield one
            yield from _below(one)
