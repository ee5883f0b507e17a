"""What a real browser makes of a page: Debian's Chromium, driven by Playwright, without a network."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

NAMES = ("chromium", "chromium-browser")
_HANDLERS = """
() => [...document.querySelectorAll('*')].filter(
    element => element.getAttributeNames().some(name => name.startsWith('on') || name === 'style')
).length
"""
_WIDTHS = "() => [document.documentElement.scrollWidth, window.innerWidth]"


class CannotBrowse(Exception):
    """There is no browser here, or nothing to drive it with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What happened while a page was open."""

    requests: tuple[str, ...]
    """Addresses that it asked for beside itself."""
    console_errors: tuple[str, ...]
    page_errors: tuple[str, ...]
    dialogs: tuple[str, ...]
    scripts: int
    """Elements that are scripts."""
    handlers: int
    """Elements with an attribute that holds script or style."""
    text: str
    """Everything that is written on it."""
    wider_by_px: int
    """By so much the page is wider than its window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """What axe-core finds fault with."""

    rule: str
    impact: str
    places: int
    example: str


def chromium() -> str:
    """Where the browser lies.

    Raises:
        CannotBrowse: If there is none.
    """
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise CannotBrowse("no chromium here: apt-get install chromium")
    return found


def visit(
    page_file: Path, *, width: int = 1400, colours: Literal["light", "dark"] = "light", media: str = "screen"
) -> Visit:
    """Open a page and look.

    Raises:
        CannotBrowse: If there is no browser.
    """
    address = page_file.resolve().as_uri()
    requests: list[str] = []
    console: list[str] = []
    errors: list[str] = []
    dialogs: list[str] = []
    with _browser() as browser, _context(browser, width, colours, bypass_csp=False) as context:
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda said: console.append(said.text) if said.type in {"error", "warning"} else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        page.on("dialog", lambda dialog: dialog.dismiss())
        page.emulate_media(media="print" if media == "print" else "screen")
        page.goto(address, wait_until="load")
        scrolled, window = page.evaluate(_WIDTHS)
        return Visit(
            requests=tuple(url for url in requests if url != address),
            console_errors=tuple(console),
            page_errors=tuple(errors),
            dialogs=tuple(dialogs),
            scripts=page.locator("script").count(),
            handlers=page.evaluate(_HANDLERS),
            text=page.evaluate("() => document.body.textContent"),
            wider_by_px=max(0, scrolled - window),
        )


def audit(page_file: Path, *, width: int = 1400, colours: Literal["light", "dark"] = "light") -> tuple[Violation, ...]:
    """Everything that axe-core finds, of any impact; it is a script, so the page's policy is put aside for it.

    Raises:
        CannotBrowse: If there is no browser.
    """
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError as error:
        raise CannotBrowse("no axe-core here: pip install axe-playwright-python") from error
    with _browser() as browser, _context(browser, width, colours, bypass_csp=True) as context:
        page = context.new_page()
        page.goto(page_file.resolve().as_uri(), wait_until="load")
        found = Axe().run(page).response["violations"]
    return tuple(
        Violation(
            rule=one["id"], impact=str(one["impact"]), places=len(one["nodes"]), example=one["nodes"][0]["html"][:200]
        )
        for one in found
    )  # fmt: skip


@contextlib.contextmanager
def _browser() -> "Iterator[Browser]":
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise CannotBrowse("no playwright here: pip install playwright") from error
    path = chromium()
    with sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            raise CannotBrowse(f"{path} does not start: {error.message[:200]}") from error
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def _context(
    browser: "Browser", width: int, colours: Literal["light", "dark"], *, bypass_csp: bool
) -> "Iterator[BrowserContext]":
    context = browser.new_context(
        viewport={"width": width, "height": 900}, offline=True, color_scheme=colours, bypass_csp=bypass_csp
    )
    try:
        yield context
    finally:
        context.close()
