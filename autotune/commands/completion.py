"""What a shell offers after an option: models, cards, profiles, site files. Each loads no more than it needs.

Where nothing is offered, shells complete file names by themselves.
"""

from collections.abc import Iterator
from pathlib import Path

_PROFILES = "profiles"
_NO_PROFILES = ("pyproject.toml", "site.toml")
_KEPT = ".previous.toml"
"""Of profiles that were replaced: nobody means them."""


def models(incomplete: str) -> list[str]:
    """Presets that begin so."""
    from trainer.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def cards(incomplete: str) -> list[tuple[str, str]]:
    """Cards that begin so, each with its full name."""
    from autotune.core.cards import CARDS

    return [(card.key, card.name) for card in CARDS if card.key.startswith(incomplete.lower())]


def profiles(incomplete: str) -> list[str]:
    """Profiles that begin so: in the directory that was typed, here, and under ``profiles/``."""
    found = [*_tables(incomplete), *_tables(f"{_PROFILES}/")]
    return [
        name
        for name in dict.fromkeys(found)
        if name.startswith(incomplete) and not name.endswith(_KEPT) and Path(name).name not in _NO_PROFILES
    ]


def sites(incomplete: str) -> list[str]:
    """TOML files that begin so and lie where no profiles do."""
    return [name for name in _tables(incomplete) if not name.startswith(f"{_PROFILES}/") and name != _NO_PROFILES[0]]


def _tables(incomplete: str) -> Iterator[str]:
    """TOML files of the directory that was typed, which begin so."""
    directory, slash, begun = incomplete.rpartition("/")
    try:
        entries = sorted(Path(directory + slash or ".").expanduser().glob("*.toml"))
    except OSError:
        return
    yield from (f"{directory}{slash}{entry.name}" for entry in entries if entry.name.startswith(begun))
