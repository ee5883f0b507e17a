"""The documentation as a site: it builds without warnings, and fetches nothing."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autotune.advice.decide.rules import RULES
from testbed.browser import visit
from tests.documentation.blocks import ROOT
from trainer.formats.train_config import TrainConfig

EXPLANATIONS = ("benchmarks", "how-it-works")
SLOW = [
    (name, width)
    for name in ("index", "reference/profile", "benchmarks", "comparison")
    for width in (390, 1440)
]
SEEN = [
    ("quickstart", 390),
    ("reference/commands", 390),
    *(pytest.param(name, width, marks=pytest.mark.slow) for name, width in SLOW),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(directory),
    ]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return directory


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    styles = list(site.rglob("*.css"))
    assert len(pages) > 20
    assert styles
    loaded: list[str] = []
    reader = HTMLParser()
    # A page loads everything itself, except links, which a reader follows.
    reader.handle_starttag = lambda tag, attributes: loaded.extend(
        value or ""
        for key, value in attributes
        if tag != "a" and key in ("src", "href", "srcset", "data", "poster")
    )
    for page in pages:
        loaded.clear()
        reader.feed(page.read_text(encoding="utf-8"))
        assert loaded
        assert [
            address for address in loaded if re.match(r"(https?:)?//", address)
        ] == [], page
    for style in styles:
        text = style.read_text(encoding="utf-8")
        assert (
            re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"']*", text) == []
        ), style


def test_reference_is_made_from_the_code(site):
    text = {
        name: (site / "reference" / f"{name}.html").read_text()
        for name in ("commands", "profile", "site")
    }
    assert 'id="autotune-data-prepare"' in text["commands"]
    assert "Sequence length. Default: 512." in text["commands"]
    assert "--set train.KEY=VALUE" in text["commands"]
    assert "job meet" not in text["commands"]
    assert (
        f"<td>{TrainConfig.model_fields['micro_batch_size'].description}</td>"
        in text["profile"]
    )
    assert "[[evidence.probe.curve]]" in text["profile"]
    advice = (site / "reference" / "advice.html").read_text()
    assert [
        rule.name
        for rule in RULES
        if f"<td><code>{rule.name}</code></td>" not in advice
    ] == []
    assert "<td>04:00:00</td>" in text["site"]


def test_navigation_has_every_page(site):
    index = (site / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert (
            f'href="{page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()}"'
            in index
        ), page


@pytest.mark.parametrize("name", EXPLANATIONS)
def test_explanations_name_sources_with_limits(name):
    heads = re.findall(
        r"^## (.*)$", (ROOT / "docs" / f"{name}.md").read_text(), re.MULTILINE
    )
    assert any(head.startswith("Sources") for head in heads)
    assert any(head.startswith("Limits") or "left out" in head for head in heads)


@pytest.mark.system
@pytest.mark.usefixtures("browser")
@pytest.mark.parametrize(("name", "width"), SEEN)
def test_page_fits_its_window(site, name, width):
    visited = visit(site / f"{name}.html", width=width)
    assert [
        request for request in visited.requests if not request.startswith("file:")
    ] == []
    assert (
        visited.console_errors,
        visited.page_errors,
        visited.dialogs,
        visited.wider_by_px,
    ) == (
        (),
        (),
        (),
        0,
    )
