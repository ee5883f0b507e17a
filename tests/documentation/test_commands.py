"""Every command that the documentation names is one that the programs know."""

import pytest

from tests.documentation.blocks import PAGES, ROOT, Command, commands_of, named_in_prose
from tests.documentation.command_line import Wrong, check, check_named, names

COMMANDS = [command for page in PAGES for command in commands_of(page)]
NAMED = [command for page in PAGES for command in named_in_prose(page, names())]


def test_the_documentation_names_commands():
    assert len(COMMANDS) > 100
    assert len(NAMED) > 50


@pytest.mark.parametrize(("look", "commands"), [(check, COMMANDS), (check_named, NAMED)])
def test_every_command_exists_and_has_its_options(look, commands):
    wrong = []
    for command in commands:
        try:
            look(command)
        except (Wrong, ValueError) as error:  # ValueError: open quotes
            wrong.append(f"{command.where}\n    {error}")
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("autotune prob --model bert-mini", "has no command prob"),
        ("autotune probe --modle bert-mini --data d", "No such option: --modle"),
        ("autotune probe --data d", "Missing option .--model"),
        ("autotune probe --model m --data d --max-rows many", "--max-rows"),
        ("autotune data", "needs a command behind it"),
        ("autotune data inspect a b", "unexpected extra argument"),
        ("python -m trainer --profli P --data d", "--profile"),
        ("python -m benchmarks.nothing", "no module"),
        ("torchrun --nproc-per-node 2 -m trainer --data d", "--profile"),
        ("torchrun --no-such-option -m trainer --profile P", "no-such-option"),
        ("make nothing", "no target nothing"),
        ("ssh host autotune data verfy d", "has no command verfy"),
        ("fetch everything", "is no program"),
    ],
)
def test_a_slip_in_a_command_is_found(text, why):
    with pytest.raises(Wrong, match=why):
        check(Command(page=ROOT / "README.md", line=1, text=text))


def test_what_is_left_out_is_no_slip():
    check(Command(page=ROOT / "README.md", line=1, text="autotune probe --model bert-120m … --seq-length 128"))
    check(Command(page=ROOT / "README.md", line=1, text="autotune profile explain P [KEY]"))
    with pytest.raises(Wrong, match="no option --modle"):
        check_named(Command(page=ROOT / "README.md", line=1, text="autotune probe --modle bert-mini"))


def test_blocks_are_read_as_people_read_them(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        'text `autotune doctor --json` more\n\n```sh\n# said\nautotune doctor   # why\ne="autotune estimate"\n'
        "$e --model m \\\n  --device cpu\n```\n\n```\n$ autotune doctor\nHost\n$ make test\n```\n\n"
        "```toml\na = 1\n```\n"
    )
    found = commands_of(page)
    assert [one.words for one in found] == [
        ["autotune", "doctor"],
        ["autotune", "estimate", "--model", "m", "--device", "cpu"],
        ["autotune", "doctor"],
        ["make", "test"],
    ]
    assert [one.line for one in found] == [5, 7, 12, 14]
    assert [one.prints for one in found] == [(), (), ("Host",), ()]
    assert [one.text for one in named_in_prose(page)] == ["autotune doctor --json"]
