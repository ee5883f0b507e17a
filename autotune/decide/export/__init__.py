"""A profile's settings in the words of another trainer. Pure: a table of rows for each trainer that is known."""

from autotune.decide.export.subject import Subject
from autotune.decide.export.targets import export_to

__all__ = ["Subject", "export_to"]
