"""Charts as static SVG.

The page that holds them allows no script, no style attribute and no external resource.
"""

import io
import re
import warnings
from typing import Any
from xml.etree import ElementTree

from autotune.base.chart_figure import INK, figure_of
from autotune.base.document import Drawing
from autotune.base.tables import printable_line

_SVG = "http://www.w3.org/2000/svg"
_FRACTION = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
"""A coordinate or size; matplotlib writes six decimals, of which two are visible."""
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the page's own font
    "svg.hashsalt": "autotune",  # the same drawing has the same bytes
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a dollar is a dollar
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def render_svg(
    drawing: Drawing, *, key: str, title: str, description: str, small: bool = False
) -> str:
    """Return an ``<svg>`` element with a title and description for screen readers.

    Args:
        drawing: What to draw.
        key: Prefix of the element's ids.
        title: Title of the chart.
        description: Description for readers who cannot see the chart.
        small: True if the chart is made for half the width.
    """
    import matplotlib

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # matplotlib warns of letters that its own font lacks, and of figures too odd to
        # be drawn well.
        warnings.simplefilter("ignore")
        svg = io.StringIO()
        figure_of(drawing, small=small).savefig(svg, format="svg")
    root = ElementTree.fromstring(svg.getvalue())
    _simplify(root, key)
    # Screen readers expect the title first.
    root.insert(0, _label("title", title, key))
    root.insert(1, _label("desc", description, key))
    root.attrib |= {"role": "img", "aria-labelledby": f"{key}-title {key}-desc"}
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _label(name: str, text: str, key: str) -> ElementTree.Element:
    """Return a ``<title>`` or ``<desc>`` element, to whose id the chart refers."""
    label = ElementTree.Element(f"{{{_SVG}}}{name}", {"id": f"{key}-{name}"})
    label.text = printable_line(text)
    return label


def _simplify(root: ElementTree.Element, key: str) -> None:
    """Turn styles into attributes; drop metadata, blanks and invisible digits.

    Prefix ids with ``key``.
    """
    dropped = {f"{{{_SVG}}}style", f"{{{_SVG}}}metadata"}
    for parent in list(root.iter()):
        parent[:] = [child for child in parent if child.tag not in dropped]
    for element in root.iter():
        attributes = _plain_attributes(element)
        element.attrib.clear()
        for name, value in attributes.items():
            # Attributes of other namespaces, such as xlink, lose theirs.
            short_name = name.rpartition("}")[2]
            element.set(short_name, _plain_value(name, value, key))
        element.text = _none_if_blank(element.text)
        element.tail = _none_if_blank(element.tail)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)  # as wide as its container
    root.attrib |= {
        "stroke-linejoin": "round",
        "stroke-linecap": "butt",
        "font-family": "sans-serif",
    }


def _plain_attributes(element: ElementTree.Element) -> dict[str, str]:
    """Return the attributes of an element, with those of its style among them."""
    attributes = dict(element.attrib)
    for declaration in attributes.pop("style", "").split(";"):
        if declaration:
            name, _, value = declaration.partition(":")
            attributes[name.strip()] = value.strip()
    if element.tag == f"{{{_SVG}}}text":
        attributes.setdefault("fill", INK)
        font = attributes.pop("font", None) or attributes["font-size"]
        attributes["font-size"] = re.findall(r"([\d.]+)px", font)[0]
        attributes.pop("font-family", None)
    if element.tag == f"{{{_SVG}}}g":
        attributes.pop("id", None)  # nothing refers to these
    return attributes


def _plain_value(name: str, value: str, key: str) -> str:
    """Return an attribute's value with two decimals, and ids prefixed with ``key``."""
    if name == "id":
        return f"{key}-{value}"
    if name.endswith("href"):
        return f"#{key}-{value.removeprefix('#')}"
    if value.lower() == INK:
        return "currentColor"
    return _FRACTION.sub(_two_decimals, value).replace("url(#", f"url(#{key}-")


def _two_decimals(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _none_if_blank(text: str | None) -> str | None:
    return text if text and text.strip() else None
