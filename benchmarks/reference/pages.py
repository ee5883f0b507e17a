"""Which pages of reference there are, and how each is made."""

from collections.abc import Callable, Mapping
from pathlib import Path

from autotune.store import write_atomically
from benchmarks.reference import commands, environment, exit_codes, fields

DIRECTORY = Path(__file__).parent.parent.parent / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": commands.page,
    "profile.md": fields.profile_page,
    "site.md": fields.site_page,
    "exit-codes.md": exit_codes.page,
    "environment.md": environment.page,
}


def write() -> None:
    """Write all of them."""
    for name, page in PAGES.items():
        write_atomically(DIRECTORY / name, page())
