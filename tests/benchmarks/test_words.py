"""The check of the project's words finds bad ones, and nothing in good ones."""

import ast

import pytest

from benchmarks import words


def findings(text: str) -> list[str]:
    return [
        finding
        for line, block in words.blocks(text)
        for finding in words.findings_in(f"page.md:{line}", block)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "A run goes on after a crash.",
        "It begins anew.",
        "Nobody asked.",
        "Where a GPU is missing, it fails.",
        "It has no GPU. Where the driver is old, it fails.",
        "It is skipped where there is no GPU.",
        "The rate of real tokens.",
        "With 4 loader workers.",
        "Held against A.",
        f"{'word ' * 41}.",
        "| cell | it starts afresh |",
        "Fine.\n\nIt stops by itself.",
    ],
)
def test_finds_bad_words(text):
    assert len(findings(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "The run resumes after a crash.",
        "4 DataLoader workers.",
        "Where do results go?",
        "The page where it lies.",
        "```sh\nautotune goes on\n```",
        "`goes on`",
        "<!-- goes on -->",
        f"{'word ' * 39}. A {'word ' * 38}.",
        "[a link](docs/anew.md)",
        f"| {'word ' * 30} | {'word ' * 30} |",
    ],
)
def test_accepts_good_words(text):
    assert findings(text) == []


def test_finding_names_line_and_replacement():
    found = findings("Fine.\n\nTwo ledgers.")
    assert found == ["page.md:3: 'ledgers': write 'trial log, memory breakdown'"]


def test_reads_docstrings_with_messages():
    source = (
        'def f(x):\n    """Return it.\n\n    It goes on."""\n    raise ValueError(f"{x}'
        ' is\\nlost")\nKEY = "goes_on"\n'
    )
    texts = [(line, text.strip()) for line, text in words.texts_of(ast.parse(source))]
    assert texts == [(2, "Return it."), (4, "It goes on."), (5, "is\nlost")]
