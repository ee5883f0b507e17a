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

_SVG_NAMESPACE = "http://www.w3.org/2000/svg"
_TAG_PREFIX = f"{{{_SVG_NAMESPACE}}}"
"""Beginning of each tag of SVG, as ElementTree writes a namespace."""
_FRACTION = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
"""A coordinate or size; matplotlib writes six decimals, of which two are visible."""
_FONT_SIZE = re.compile(r"([\d.]+)px")
"""Size in a CSS font, such as ``9.5px 'sans-serif'``."""
# The type that matplotlib asks for is a union of all names of its settings.
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
        drawing: The drawing.
        key: Prefix of all ids in the element, unique in the page.
        title: Title of the chart.
        description: Description for readers who cannot see the chart.
        small: True if the chart is made for half the width of the page.
    """
    # Imported here, as matplotlib takes long and only pages with charts need it.
    import matplotlib

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # matplotlib warns of letters that its own font lacks, and of figures too odd to
        # be drawn well.
        warnings.simplefilter("ignore")
        svg = io.StringIO()
        figure_of(drawing, small=small).savefig(svg, format="svg")
    root = ElementTree.fromstring(svg.getvalue())
    _simplify(root, key)
    title_element = _label("title", title, key)
    description_element = _label("desc", description, key)
    # Screen readers expect the title first.
    root.insert(0, title_element)
    root.insert(1, description_element)
    label_ids = f"{title_element.attrib['id']} {description_element.attrib['id']}"
    root.attrib |= {"role": "img", "aria-labelledby": label_ids}
    # Without it, tags would have a prefix, which HTML does not know.
    ElementTree.register_namespace("", _SVG_NAMESPACE)
    return ElementTree.tostring(root, encoding="unicode")


def _label(name: str, text: str, key: str) -> ElementTree.Element:
    """Return a ``<title>`` or ``<desc>`` element, to whose id the chart refers."""
    label = ElementTree.Element(f"{_TAG_PREFIX}{name}", {"id": f"{key}-{name}"})
    label.text = printable_line(text)
    return label


def _simplify(root: ElementTree.Element, key: str) -> None:
    """Turn styles into attributes, which the policy of the page requires.

    Drop metadata, blanks and invisible digits, and prefix ids with ``key``.
    """
    dropped_tags = {f"{_TAG_PREFIX}style", f"{_TAG_PREFIX}metadata"}
    # A list, as the tree changes in the loop.
    for parent in list(root.iter()):
        parent[:] = [child for child in parent if child.tag not in dropped_tags]
    for element in root.iter():
        attributes = _plain_attributes(element)
        element.attrib.clear()
        for name, value in attributes.items():
            # Attributes of other namespaces, such as xlink, lose theirs.
            short_name = name.rpartition("}")[2]
            element.set(short_name, _plain_value(name, value, key))
        element.text = _none_if_blank(element.text)
        element.tail = _none_if_blank(element.tail)
    # Without a size, the chart is as wide as its container.
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    # Attributes that most elements would repeat.
    root.attrib |= {
        "stroke-linejoin": "round",
        "stroke-linecap": "butt",
        "font-family": "sans-serif",
    }


def _plain_attributes(element: ElementTree.Element) -> dict[str, str]:
    """Return the attributes of an element, and the declarations of its style as such.

    Text gets its colour and font size; families of fonts and ids of groups are left
    out.
    """
    attributes = dict(element.attrib)
    for declaration in attributes.pop("style", "").split(";"):
        if declaration:
            name, _, value = declaration.partition(":")
            attributes[name.strip()] = value.strip()
    if element.tag == f"{_TAG_PREFIX}text":
        attributes.setdefault("fill", INK)
        # matplotlib writes the size alone, or as part of all properties of the font.
        font = attributes.pop("font", None) or attributes["font-size"]
        attributes["font-size"] = _FONT_SIZE.findall(font)[0]
        attributes.pop("font-family", None)
    if element.tag == f"{_TAG_PREFIX}g":
        attributes.pop("id", None)  # nothing refers to these
    return attributes


def _plain_value(name: str, value: str, key: str) -> str:
    """Return an attribute's value, with two decimals and the page's colour of text.

    Ids, and references to them, get the prefix ``key``.
    """
    if name == "id":
        return f"{key}-{value}"
    if name.endswith("href"):
        return f"#{key}-{value.removeprefix('#')}"
    if value.lower() == INK:
        return "currentColor"
    return _FRACTION.sub(_two_decimals, value).replace("url(#", f"url(#{key}-")


def _two_decimals(number: re.Match[str]) -> str:
    """Return a number with at most two decimals, without zeros at its end."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _none_if_blank(text: str | None) -> str | None:
    is_blank = text is None or not text.strip()
    return None if is_blank else text
