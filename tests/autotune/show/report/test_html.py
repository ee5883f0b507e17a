import base64
import hashlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.show.document import Bullets, Code, Document, Missing, Pairs, Paragraph, Section, Strong, Table
from autotune.show.report.build import report_document
from autotune.show.text import report_html
from tests.autotune.show.report.example import example_inputs
from tests.autotune.show.report.examples import Page, reported

SECTIONS = [
    "The answer", "Before and after", "What the tuning cost", "Memory", "Throughput by micro-batch",
    "Settings searched together", "Loader workers", "Scaling and network", "Where a step's time goes",
    "Lengths and packing", "Recommendations", "Changes of the recipe", "Training runs: expected and achieved",
    "Every trial", "The machine", "How to reproduce it", "Sign-off",
]  # fmt: skip


@pytest.fixture(scope="module")
def full():
    return report_html(report_document(*example_inputs(40)))


def test_all_sections_are_there_in_their_order_and_the_contents_lead_to_them(full):
    page = Page(full)
    assert re.findall(r'<li><a href="#[^"]+">([^<]*)</a>', full) == [title.replace("'", "&#x27;") for title in SECTIONS]
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {target.removeprefix("#") for target in page.values("href")} <= set(ids)
    assert page.tags.count("svg") == page.tags.count("figure") >= 8


def test_the_policy_allows_this_very_style_and_nothing_else(full):
    style = re.search("<style>(.*?)</style>", full, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = next(value for value in Page(full).values("content") if "default-src" in value)
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_every_chart_has_its_table_right_behind_it_and_every_table_a_name_and_can_be_scrolled_by_keys(full):
    assert full.count("</figure>") == full.count('</figure>\n<div class="box')
    page = Page(full)
    boxes = full.count('<div class="box')
    assert len([value for value in page.values("tabindex") if value == "0"]) == boxes
    assert len([value for value in page.values("aria-label") if value != "Contents"]) == boxes


def test_the_same_inputs_make_the_same_page(full):
    assert report_html(report_document(*example_inputs(40))) == full


def inert(page):
    assert "script" not in page.tags
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in {"style", "src", "srcset", "action", "formaction", "data", "poster"}, (tag, name)
        assert name != "href" or value[0] == "#", value
    unknown = set(page.tags) - {
        "html", "head", "meta", "title", "style", "body", "main", "header", "nav", "section", "div", "figure",
        "figcaption", "h1", "h2", "h3", "h4", "h5", "h6", "p", "ul", "ol", "li", "dl", "dt", "dd", "a", "code",
        "strong", "span", "table", "caption", "thead", "tbody", "tr", "th", "td", "svg", "g", "path", "use", "defs",
        "clippath", "rect", "text", "desc",
    }  # fmt: skip
    assert not unknown


def test_hostile_texts_are_texts():
    note = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'>\u202e$x$\n|`" + "A" * 10_000
    text = report_html(report_document(*example_inputs(4, note)))
    page = Page(text)
    inert(page)
    assert "<script>alert(1)</script>" in page.text
    assert "\\u202e" in page.text
    assert "\u202e" not in text
    assert "A" * 1000 not in text
    assert len(text) < 600_000


TEXT = st.text(alphabet=st.one_of(st.sampled_from("<>&\"'`|/\n\u202e\u2066\0"), st.characters()), max_size=80)


@settings(max_examples=60)
@given(st.lists(TEXT, min_size=9, max_size=9))
def test_no_text_anywhere_becomes_markup(texts):
    a, b, c, d, e, f, g, h, i = texts
    blocks = (
        Paragraph(words=(a, Strong(text=b), Code(text=c))), Missing(what=d, commands=(e,)), Bullets(items=((f,),)),
        Pairs(pairs=((g, (h,)),)), Table(caption=i, headers=(a, b), rows=((c, None),)),
        Section(title=d, key="inner", blocks=(), badge=e),
    )  # fmt: skip
    text = report_html(Document(title=f, subtitle=g, sections=(Section(title=h, key="s", blocks=blocks),)))
    page = Page(text)
    inert(page)
    plain = report_html(Document(title="", subtitle="", sections=(Section(title="", key="s", blocks=blocks),)))
    assert Page(plain).tags == page.tags
    assert not any(ord(letter) < 32 and letter != "\n" for letter in text)


def test_missing_parts_say_so_with_the_command():
    bare = reported("my profiles/m.toml")
    evidence = bare.profile.evidence.model_copy(update={"probe": None, "workers": None})
    bare = reported("my profiles/m.toml", bare.profile.model_copy(update={"evidence": evidence}))
    text = Page(report_html(report_document((bare,), ()))).text
    assert text.count("not measured") > 8
    for command in (
        "autotune baseline --profile 'my profiles/m.toml'", "autotune probe --model CONFIG.json --data DIR --out",
        "autotune workers --profile", "autotune network --profile 'my profiles/m.toml' --slurm",
        "torchrun --nproc-per-node 1 -m trainer", "autotune report build 'my profiles/m.toml' --data DIR",
        "autotune report review 'my profiles/m.toml' --approve --by NAME",
    ):  # fmt: skip
        assert command in text
