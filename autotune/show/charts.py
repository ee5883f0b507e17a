"""Charts as static SVG: no script, a title and a description for those who cannot see; figures are in tables too."""

import io
from collections.abc import Sequence
from html import escape

from autotune.core.evidence import ScalingRow
from autotune.errors import MachineLacks
from autotune.show.scaling import Scaled

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by those who see colours differently (Okabe and Ito 2008)."""
_SIZE_INCHES = (7.0, 4.6)


def scaling_chart(every: Sequence[Scaled]) -> str:
    """Real tokens/s by nodes: predicted as a line with its interval, measured as points, the ideal as a thin line.

    Raises:
        MachineLacks: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MachineLacks(
            "charts need matplotlib, not installed here", next_step="Run: pip install 'encoder-autotune[charts]'"
        ) from error
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    for scaled, colour in zip(every, _COLOURS * len(every), strict=False):
        predicted = [row for row in scaled.rows if not row.measured]
        measured = [row for row in scaled.rows if row.measured]
        nodes = [row.nodes for row in predicted]
        name = scaled.name.replace("$", r"\$")  # a dollar would begin a formula
        axes.plot(nodes, [row.real_tokens_per_s for row in predicted], color=colour, label=f"{name}, predicted")
        low, high = _band(predicted)
        axes.fill_between(nodes, low, high, color=colour, alpha=0.15, linewidth=0)
        alone = predicted[0].real_tokens_per_s / predicted[0].nodes / predicted[0].efficiency
        axes.plot(nodes, [alone * count for count in nodes], color=colour, linewidth=0.7, linestyle=":")
        if measured:
            axes.plot(
                [row.nodes for row in measured],
                [row.real_tokens_per_s for row in measured],
                color=colour, linestyle="none", marker="o", label=f"{name}, measured",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("nodes")
    axes.set_ylabel("real tokens/s")
    axes.set_title("Training on more nodes with the same global batch (dotted: ideal)", fontsize=10)
    axes.grid(visible=True, which="major", linewidth=0.3)
    axes.legend(fontsize=8)
    counts = sorted({row.nodes for scaled in every for row in scaled.rows})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    FigureCanvasSVG(figure)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return _described(drawn.getvalue(), every)


def _band(rows: Sequence[ScalingRow]) -> tuple[list[float], list[float]]:
    """Real tokens/s at both ends of the interval."""
    found: tuple[list[float], list[float]] = ([], [])
    for row in rows:
        for values, end in zip(found, (row.efficiency_low, row.efficiency_high), strict=True):
            values.append(row.real_tokens_per_s * (1.0 if end is None else end / row.efficiency))
    return found


def _described(svg: str, every: Sequence[Scaled]) -> str:
    """With words in place of the picture, right behind the opening tag."""
    useful = "; ".join(f"{scaled.name}: {scaled.useful_nodes} nodes useful" for scaled in every)
    opening = svg.index(">", svg.index("<svg")) + 1
    words = (
        "<title>Real tokens per second by number of nodes</title>"
        f"<desc>{escape(useful)}. Lines are predicted, points measured; the same figures stand in the table.</desc>"
    )
    return svg[:opening] + words + svg[opening:]
