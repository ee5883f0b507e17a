"""A page in a real browser: Debian's Chromium, driven by Playwright.

There is no network.
"""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autotune.errors import MachineLacks

if TYPE_CHECKING:
    from playwright.sync_api import Page

_HANDLERS = """
() => [...document.querySelectorAll('*')].filter(
    element => element.getAttributeNames().some(
        name => name.startsWith('on') || name === 'style'
    )
).length
"""
_WIDER_BY = (
    "() => Math.max(0, document.documentElement.scrollWidth - window.innerWidth)"
)
PAPER_PX = 690
"""Width of an A4 page between its margins."""
SERIOUS = ("serious", "critical")
LONG = 10_000
HOSTILE = (
    "</title></style></script><script>alert(1)</script><img src=https://e.example/x"
    " onerror=alert(2)>\"'` onload=alert(3) style=color:red $\\frac{1}{2}$ |"
    " \u202egnp\u2066.exe\n\0 " + "A" * LONG
)
SHOWN = (
    "<script>alert(1)</script>",
    "onerror=alert(2)",
    "\\u202egnp",
    "$\\frac{1}{2}$",
)
"""Texts of the hostile ones that must be seen on the page, letter by letter."""
Colours = Literal["light", "dark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Events while a page was open.

    It has addresses that the page requested beside itself, its messages, and its
    elements.
    """

    requests: tuple[str, ...]
    console_errors: tuple[str, ...]
    page_errors: tuple[str, ...]
    dialogs: tuple[str, ...]
    scripts: int
    handlers: int
    """Elements with an attribute that holds script or style."""
    text: str
    wider_by_px: int
    """By so much the page is wider than its window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Fault that axe-core reports."""

    rule: str
    impact: str
    example: str


def chromium() -> str:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise MachineLacks("no chromium here", next_step="apt-get install chromium")
    return program


def visit(
    page_file: Path,
    *,
    width: int = 1400,
    colours: Colours = "light",
    media: str = "screen",
) -> Visit:
    """Open a page and look, where there is a browser."""
    address = page_file.resolve().as_uri()
    requests, console, errors, dialogs = (list[str]() for _ in range(4))
    with _page(width, colours, bypass_csp=False) as page:
        page.on("request", lambda request: requests.append(request.url))
        page.on(
            "console",
            lambda message: (
                console.append(message.text)
                if message.type in {"error", "warning"}
                else None
            ),
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        page.on("dialog", lambda dialog: dialog.dismiss())
        page.emulate_media(media="print" if media == "print" else "screen")
        page.goto(address, wait_until="load")
        return Visit(
            requests=tuple(url for url in requests if url != address),
            console_errors=tuple(console),
            page_errors=tuple(errors),
            dialogs=tuple(dialogs),
            scripts=page.locator("script").count(),
            handlers=page.evaluate(_HANDLERS),
            text=page.evaluate("() => document.body.textContent"),
            wider_by_px=page.evaluate(_WIDER_BY),
        )


def audit(
    page_file: Path, *, width: int = 1400, colours: Colours = "light"
) -> tuple[Violation, ...]:
    """Return all findings of axe-core, of any impact.

    It is a script, so the page's policy is put aside for it.
    """
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError as error:
        raise MachineLacks(
            "no axe-core here", next_step="pip install axe-playwright-python"
        ) from error
    with _page(width, colours, bypass_csp=True) as page:
        page.goto(page_file.resolve().as_uri(), wait_until="load")
        violations = Axe().run(page).response["violations"]
    return tuple(
        Violation(
            rule=violation["id"],
            impact=str(violation["impact"]),
            example=violation["nodes"][0]["html"][:200],
        )
        for violation in violations
    )


def taken_in(page_visit: Visit) -> dict[str, int]:
    """Count what of a hostile page is more than text, and texts that are not shown."""
    return {
        "scripts": page_visit.scripts,
        "handlers": page_visit.handlers,
        "dialogs": len(page_visit.dialogs),
        "not_shown": sum(text not in page_visit.text for text in SHOWN),
        "steering": sum(letter in page_visit.text for letter in "\u202e\u2066\0"),
        "uncut": int("A" * (LONG // 2) in page_visit.text),
    }


@contextlib.contextmanager
def _page(width: int, colours: Colours, *, bypass_csp: bool) -> "Iterator[Page]":
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise MachineLacks(
            "no playwright here", next_step="pip install playwright"
        ) from error
    path = chromium()
    with sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(
                executable_path=path, args=["--no-sandbox"]
            )
        except Error as error:
            raise MachineLacks(
                f"{path} does not start: {error.message[:200]}",
                next_step="run it by hand",
            ) from error
        with browser:
            yield browser.new_page(
                viewport={"width": width, "height": 900},
                offline=True,
                color_scheme=colours,
                bypass_csp=bypass_csp,
            )
