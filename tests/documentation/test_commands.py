"""Every command that the documentation names is one that the programs know."""

import pytest

from tests.documentation.blocks import PAGES, ROOT, Command, commands_of, named_in_prose
from tests.documentation.command_line import Wrong, check, check_named, root

COMMANDS = [command for page in PAGES for command in commands_of(page)]
NAMED = [command for page in PAGES for command in named_in_prose(page, root().commands)]


@pytest.mark.parametrize(("look", "commands", "least"), [(check, COMMANDS, 100), (check_named, NAMED, 50)])
def test_every_command_exists_and_has_its_options(look, commands, least):
    assert len(commands) > least
    wrong = []
    for command in commands:
        try:
            look(command)
        except (Wrong, ValueError) as error:  # ValueError: open quotes
            wrong.append(f"{command.where}\n    {error}")
    assert wrong == []


def typed(text: str) -> Command:
    return Command(page=ROOT / "README.md", line=1, text=text)


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
        check(typed(text))


def test_what_is_left_out_is_no_slip():
    check(typed("autotune probe --model bert-120m … --seq-length 128"))
    check(typed("autotune profile explain P [KEY]"))
    with pytest.raises(Wrong, match="no option --modle"):
        check_named(typed("autotune probe --modle bert-mini"))


def test_blocks_are_read_as_people_read_them(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        'text `autotune doctor --json` more\n\n```sh\n# said\nautotune doctor   # why\ne="autotune estimate"\n'
        "$e --model m \\\n  --device cpu\n```\n\n```\n$ autotune doctor\nHost\n$ make test\n```\n\n"
        "```toml\na = 1\n```\n"
    )
    found = commands_of(page)
    assert [(one.line, " ".join(one.words), one.prints) for one in found] == [
        (5, "autotune doctor", ()),
        (7, "autotune estimate --model m --device cpu", ()),
        (12, "autotune doctor", ("Host",)),
        (14, "make test", ()),
    ]
    assert [one.text for one in named_in_prose(page)] == ["autotune doctor --json"]
