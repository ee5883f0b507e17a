"""Paths of the pages of the documentation, for help and error messages."""

from pathlib import Path

_ROOT = Path(__file__).parents[2]


def documentation_path(page: str) -> str:
    """Return the path of a page, such as ``faq.md#out-of-memory``.

    In a checkout it is relative to the checkout. A wheel has the pages inside of the
    package ``autotune``, and the path is absolute.
    """
    is_checkout = (_ROOT / "pyproject.toml").is_file()
    return f"docs/{page}" if is_checkout else str(_ROOT / "autotune" / "docs" / page)
