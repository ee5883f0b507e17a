"""Draw the charts of the documentation from committed figures.

They are SVG files in ``docs/assets``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.page_figures.recorded import RecordedFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart without red-green vision.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#d55e00", "#009e73", "#7f7f7f"
_STYLE: Any = {  # keys are literals in matplotlib's types
    "svg.hashsalt": "encoder-autotune",  # the same chart has the same bytes
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica", "sans-serif"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
_GIB = 2**30


def draw(root: Path, recorded: RecordedFigures) -> None:
    """Write all charts.

    Args:
        root: Root of the repository.
        recorded: All recorded figures.
    """
    probe = recorded.first_h100_profile["evidence"]["probe"]
    paper = recorded.benchmarks["paper_case"]
    assets = root / "docs" / "assets"
    _save(assets / "throughput.svg", 3.2, lambda axes: _throughput(axes, probe))
    _save(assets / "memory.svg", 2.9, lambda axes: _memory(axes, probe))
    _save(assets / "scaling.svg", 3.2, lambda axes: _scaling(axes, paper))


def _save(path: Path, height_inches: float, fill: Callable[["Axes"], None]) -> None:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7, height_inches), layout="constrained")
        FigureCanvasSVG(figure)
        fill(figure.add_subplot())
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _throughput(axes: "Axes", probe: Mapping[str, Any]) -> None:
    curve = [(point["size"], point["units_per_s"] / 1e3) for point in probe["curve"]]
    chosen = probe["sustained"]
    axes.plot(
        *zip(*curve, strict=True), "o-", color=_BLUE, label="measured, 10 steps each"
    )
    point = chosen["size"], chosen["units_per_s"] / 1e3
    axes.plot(
        *point, "D", color=_ORANGE, markersize=8, label=f"chosen: {point[0]}, warm"
    )
    axes.axvline(
        probe["infeasible_min"],
        color=_GREY,
        linestyle="--",
        label=f"{probe['infeasible_min']}: out of memory",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        [2**power for power in range(9)], [str(2**power) for power in range(9)]
    )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batch size (sequences of 512 tokens)")
    axes.set_ylabel("thousand tokens/s, with padding")
    axes.legend(frameon=False, loc="upper left")


_GROUPS = {
    "weights and optimizer": ("16-bit copies of weights", "parameters", "optimizer"),
    "gradients": ("gradients",),
    "temporaries": ("temporaries",),
    "MLM head and loss": ("head and loss",),
    "fragmentation": ("rounding and fragmentation",),
    "non-PyTorch memory": ("non-PyTorch memory", "matmul workspaces"),
}


def _memory(axes: "Axes", probe: Mapping[str, Any]) -> None:
    terms: Mapping[str, int] = probe["traced_terms_bytes"]
    grouped = {
        name: sum(terms[term] for term in group) for name, group in _GROUPS.items()
    }
    rest = sum(terms.values()) - sum(grouped.values())
    rows = sorted({"activations": rest, **grouped}.items(), key=lambda row: row[1])
    bars = axes.barh(
        [name for name, _ in rows], [size / _GIB for _, size in rows], color=_BLUE
    )
    axes.bar_label(bars, labels=[f"{size / _GIB:.1f}" for _, size in rows], padding=3)
    axes.grid(visible=False, axis="y")
    predicted, peak = (
        probe["traced_peak_bytes"] / _GIB,
        probe["feasible_peak_bytes"] / _GIB,
    )
    axes.set_xlabel(
        f"GiB at {probe['feasible_max']} sequences: {predicted:.1f} predicted,"
        f" {peak:.1f} measured"
    )


def _scaling(axes: "Axes", paper: Mapping[str, Any]) -> None:
    nodes = (1, 2, 8, 32, 128)
    first = [curve["efficiency"] for curve in paper["scaling"][:4]]
    names = (
        "fp32 (the paper's setting)",
        "bf16",
        "bf16, 16-bit gradients",
        "… and 4 accumulation steps",
    )
    lines = ("s-", _GREY, 9), ("^-", _ORANGE, 6), ("o-", _BLUE, 6), ("D--", _GREEN, 5)
    for name, shares, (line, colour, size) in zip(names, first, lines, strict=True):
        axes.plot(
            nodes,
            [100 * share for share in shares],
            line,
            color=colour,
            markersize=size,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.set_ylim(0, 104)
    axes.set_xlabel("nodes of two H100, 25-Gigabit Ethernet (predicted)")
    axes.set_ylabel("efficiency in %")
    axes.legend(frameon=False, loc="lower left")
