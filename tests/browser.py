"""A headless Chromium of the system, driven by playwright; pages of the kept servers as a person sees them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasks import servers
from tests.kept import KeptHome

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PAGE_MS = 30_000


@contextmanager
def chromium() -> Iterator[Any]:
    """A page of a fresh profile. Skips the test where there is no browser, or nothing to drive it with."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install 'headway[browser]', or make test-browser")
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium, or make test-browser")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, headless=True,
                                         args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.set_default_timeout(PAGE_MS)
            yield page
        finally:
            browser.close()


@contextmanager
def listened() -> Iterator[Any]:
    """As `chromium`: `page.said` is what it says on its console, `page.got` the addresses that it asked for."""
    with chromium() as page:
        page.said, page.got = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("requestfinished", lambda request: page.got.append(request.url))
        yield page


def open_prefect(page: Any, home: KeptHome, path: str) -> None:
    """Open a page of Prefect, and log in where it asks for the password."""
    page.goto(f"{home.prefect_page}/v2{path}")
    password = page.locator("input[type=password]")
    password.or_(page.get_by_role("button", name="Open menu")).first.wait_for()
    if password.count():
        password.fill(servers.prefect_auth(home.path))
        page.get_by_role("button", name="Login").click()
        password.wait_for(state="detached")
        page.goto(f"{home.prefect_page}/v2{path}")


@contextmanager
def pictured(page: Any, place: Path) -> Iterator[None]:
    """What the page shows in the end lies at `place`, also where the test fails."""
    try:
        yield
    finally:
        page.screenshot(path=str(place))
