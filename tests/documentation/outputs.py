"""Comparison of output that a page shows with output that a command prints.

Words are compared exactly. A number matches any number of the same kind and unit: a
count another count, ``6.08 MiB`` another binary size, ``2.32x`` another ratio with two
decimals. A noun behind a count may change its number: ``37 files`` matches ``1 file``.
A measured figure with its interval, ``2.32x (2.05x to 2.63x)``, matches one without,
and ``n/a``: a slow machine has no time for all rounds, and the command says so.
"""

import re

_BINARY = r"(?:B|KiB|MiB|GiB|TiB)"
_DECIMAL = r"(?:kB|MB|GB|TB)"
# As format_seconds and exact_seconds write them.
_DURATION = (
    r"(?:\d+ h \d\d min|\d+ min \d\d s|\d[\d.]* ?(?:ms|us|s|min|h)(?![A-Za-z/]))"
)
_SCALED = r"\d[\d,]*(?:\.\d+)?(?:e\+\d+)?"
# A count with separators may be below 1,000 elsewhere.
_COUNT = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_FIGURE = r"\d[\d,]*(?:\.\d+)?x?"
_KINDS = (
    rf"(?P<figure>{_FIGURE}) \({_FIGURE} to {_FIGURE}\)",
    rf"(?P<duration>{_DURATION})",
    rf"{_SCALED}(?P<binary> ?){_BINARY}\b",
    rf"{_SCALED}(?P<decimal> ?){_DECIMAL}\b",
    r"\d[\d,]* (?P<noun>[a-z]{2,})s\b",
    r"1 (?P<single>[a-z]{3,})\b",
    r"(?P<sign>[-+](?=\d))?\d[\d,]*(?:\.(?P<decimals>\d+))?",
)
# Digits that belong to a word, such as uint16, are part of the word.
_QUANTITY = re.compile(rf"(?<![\w.])(?:{'|'.join(_KINDS)})")


def words_of(line: str) -> str:
    """Return a line with single spaces, without the spaces that align columns."""
    return " ".join(line.split())


def line_pattern(line: str) -> re.Pattern[str]:
    """Return a pattern of all lines that differ only in the values of numbers."""
    line = words_of(line)
    pattern = ""
    position = 0
    for quantity in _QUANTITY.finditer(line):
        pattern += re.escape(line[position : quantity.start()])
        pattern += _pattern_of(quantity)
        position = quantity.end()
    return re.compile(pattern + re.escape(line[position:]))


def _pattern_of(quantity: re.Match[str]) -> str:
    if quantity["figure"]:
        figure = _figure_pattern(quantity["figure"])
        return rf"(?:n/a|{figure}(?: \({figure} to {figure}\))?)"
    if quantity["duration"]:
        return _DURATION
    if quantity["binary"] is not None:
        return _SCALED + quantity["binary"] + _BINARY
    if quantity["decimal"] is not None:
        return _SCALED + quantity["decimal"] + _DECIMAL
    noun = quantity["noun"] or quantity["single"]
    if noun:
        return rf"(?:1 {noun}|{_COUNT} {noun}s)"
    sign = "[-+]" if quantity["sign"] else ""
    decimals = quantity["decimals"]
    fraction = rf"\.\d{{{len(decimals)}}}" if decimals else ""
    return f"{sign}{_COUNT}{fraction}"


def _figure_pattern(figure: str) -> str:
    """Return a pattern of figures with as many decimals, and ``x`` behind ratios."""
    decimals = figure.rstrip("x").partition(".")[2]
    fraction = rf"\.\d{{{len(decimals)}}}" if decimals else ""
    return f"{_COUNT}{fraction}{'x' if figure.endswith('x') else ''}"
