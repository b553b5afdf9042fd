"""A headless Chromium for tests of the server's page, on the PATH or Playwright's own; needs Playwright's package."""

import contextlib
import shutil

import pytest

BROWSERS = "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"
WIDTHS = {1280: 800, 390: 844}


@contextlib.contextmanager
def chromium():
    """The browser; without one, or without Playwright, the test skips."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright (pip install playwright)")
    there = next(filter(None, map(shutil.which, BROWSERS)), None)
    with playwright.sync_playwright() as engine:
        try:
            started = engine.chromium.launch(executable_path=there, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(
                f"needs Chromium, on the PATH or from `playwright install chromium`: {str(error).splitlines()[0]}"
            )
        yield started
        started.close()


@contextlib.contextmanager
def pages(browser):
    """Opens the page of a script: with what it logs, and every address it asks for."""
    contexts = []

    def opened(address, *, path="/", width=1280, scheme="light", **options):
        context = browser.new_context(
            viewport={"width": width, "height": WIDTHS[width]}, color_scheme=scheme, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.logged, page.asked = [], []
        page.on("console", lambda message: page.logged.append(message.text))
        page.on("pageerror", lambda error: page.logged.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(address + path)
        return page

    yield opened
    for context in contexts:
        context.close()


def ask(page, text, *, wait=True):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    if wait:
        page.wait_for_selector("#send:not([hidden])")


def texts(page):
    return page.locator(".answer > .text").all_text_contents()


def tip(page):
    """The shown tip: its token's probability, and the rows."""
    shown = page.locator("#tip")
    rows = [tuple(row.locator("code, span").all_text_contents()) for row in shown.locator("li").all()]
    return shown.locator("b").first.text_content(), rows
