"""A real browser for tests of pages: headless Chromium, offline, with everything it complains about."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
DRAWN = "[...document.querySelectorAll('[data-plot]')].every(canvas => canvas.dataset.focus === String(state.focus))"


class Visit:
    """An open page, what it asked the network for, and what went wrong on it."""

    def __init__(self, browser: Any, path: Path, width: int = 1100, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        self.context.set_default_timeout(120_000)            # a busy machine is slow, not wrong
        self.page, self.problems, self.requests = self.context.new_page(), [], []
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.wait()

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *reason: Any) -> None:
        self.context.close()

    def wait(self) -> None:
        """Until every plot shows the model in focus."""
        self.page.wait_for_function(DRAWN)

    def plots(self) -> dict[str, str]:
        """What every plot holds, as text: its traces, or the sentence in its place."""
        return self.page.evaluate("""() => Object.fromEntries([...document.querySelectorAll("[data-plot]")].map(canvas => [canvas.id,
            canvas.querySelector(".nothing") ? canvas.textContent : JSON.stringify(canvas.data)]))""")

    def traces(self, plot: str) -> list[dict[str, Any]]:
        return self.page.evaluate("id => JSON.parse(JSON.stringify(document.getElementById(id).data))", plot)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def value(self, selector: str) -> float:
        """The full number behind a shown one."""
        return float(self.page.get_attribute(selector, "data-value"))

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")


@contextmanager
def chromium() -> Iterator[Any]:
    """Chromium from this machine; the test is skipped where it or playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the page is not looked at: playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"the page is not looked at: no browser here (looked for {', '.join(NAMES)})")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
