"""Drawings as static SVG for a page that allows no script, no style attribute and nothing from elsewhere."""

import io
import re
import warnings
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from autotune.show.charts.drawing import Drawing, without_infinite
from autotune.show.charts.texts import INK
from autotune.show.tables import inert

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_PRESENTATION = (
    "fill", "fill-opacity", "fill-rule", "opacity", "stroke", "stroke-dasharray", "stroke-dashoffset", "stroke-linecap",
    "stroke-linejoin", "stroke-opacity", "stroke-width", "text-anchor",
)  # fmt: skip
"""What a style attribute may hold here that an attribute of the same name says as well."""
_GEOMETRY = ("d", "points", "transform", "x", "y", "width", "height", "cx", "cy", "r", "viewBox")
_FRACTION = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_FONT_SIZE = re.compile(r"([\d.]+)px")
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the page's own font
    "svg.hashsalt": "autotune",  # the same drawing has the same bytes
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.frameon": False,
    "text.parse_math": False,  # a dollar is a dollar
}


def drawn(drawing: Drawing, *, key: str, title: str, description: str) -> str:
    """The drawing as an ``<svg>`` element.

    Args:
        drawing: What it shows.
        key: Begins every id in it, so that several can stand on one page.
        title: Its name for those who cannot see it.
        description: What it shows, in words.
    """
    import matplotlib

    from autotune.show.charts.draw import figure_of

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters its own font lacks, and of figures too odd to be drawn well
        root = ElementTree.fromstring(_saved(figure_of(without_infinite(drawing))))
    _plain(root, key)
    for place, (name, text) in enumerate((("title", title), ("desc", description))):
        words = ElementTree.Element(f"{{{_SVG}}}{name}", {"id": f"{key}-{name}"})
        words.text = inert(text)
        root.insert(place, words)
    root.attrib |= {"role": "img", "aria-labelledby": f"{key}-title {key}-desc"}
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _saved(figure: "Figure") -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return text.getvalue()


def _plain(root: ElementTree.Element, key: str) -> None:
    """Without styles, ids nobody refers to, and digits nobody sees."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in {f"{{{_SVG}}}style", f"{{{_SVG}}}metadata"}:
                parent.remove(child)
    text = ElementTree.tostring(root, encoding="unicode")
    used = sorted(set(re.findall(r'url\(#([^)"]+)\)', text)) | set(re.findall(r'href="#([^"]+)"', text)))
    names = {name: f"{key}-{number}" for number, name in enumerate(used)}
    for element in root.iter():
        _restyle(element)
        _rename(element, names)
        for name in _GEOMETRY:
            if name in element.attrib:
                element.set(name, _FRACTION.sub(_short, element.attrib[name]))
        element.text = element.text if element.text and element.text.strip() else None
        element.tail = element.tail if element.tail and element.tail.strip() else None
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)  # as wide as its place
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt", "font-family": "sans-serif"}


def _restyle(element: ElementTree.Element) -> None:
    style = element.attrib.pop("style", "")
    for part in style.split(";"):
        name, _, value = (piece.strip() for piece in part.partition(":"))
        if name in {"font", "font-size"} and (size := _FONT_SIZE.search(value)):
            element.set("font-size", size[1])
        elif name in _PRESENTATION:
            element.set(name, value)
    for name in ("fill", "stroke"):
        if element.attrib.get(name, "").lower() == INK:
            element.set(name, "currentColor")
    if element.tag == f"{{{_SVG}}}text":
        element.attrib.setdefault("fill", "currentColor")


def _rename(element: ElementTree.Element, names: dict[str, str]) -> None:
    if (own := element.attrib.pop("id", None)) in names:
        element.set("id", names[own])
    target = element.attrib.pop(f"{{{_XLINK}}}href", None)
    if target is not None:
        element.set("href", f"#{names[target.removeprefix('#')]}")
    clip = element.attrib.get("clip-path", "")
    if clip.startswith("url(#"):
        element.set("clip-path", f"url(#{names[clip[5:-1]]})")


def _short(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")
