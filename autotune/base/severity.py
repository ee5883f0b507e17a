"""Severity of a finding."""

from typing import Literal, get_args

Severity = Literal["error", "warning", "info"]
"""``error``: the run fails, or its figures are wrong. ``warning``: a change is expected
to pay. ``info``: no change."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
