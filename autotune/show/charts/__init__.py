"""Charts as static SVG: no script, a title and a description for those who cannot see; figures are in tables too."""

from autotune.show.charts.scaling import scaling_lines
from autotune.show.charts.svg import drawn

__all__ = ["drawn", "scaling_lines"]
