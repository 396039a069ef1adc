"""Opens every page of site/ in Chromium and says what is wrong: look.py SITE [--pictures FOLDER] [--chromium PROGRAM]

Each page is opened from the disk, light and dark, at 400, 800 and 1,400 pixels. Wrong are: an error of the console, a
request to any host, a file that is missing, a page wider than its window, a link or anchor that leads nowhere, a
question of the search without an answer, and one of the twelve questions that the menu does not answer in two clicks.
--pictures keeps a picture of the pages that a person should look at.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlparse

from playwright.sync_api import Browser, Page, TimeoutError, sync_playwright

WIDTHS = (400, 800, 1400)
SCHEMES = ("light", "dark")
HEIGHT = 900
IN_PICTURES = (
    *("index.html", "start/first-service.html", "guides/monitor.html", "guides/troubleshoot.html"),
    *("understand/what-fits.html", "reference/command-line.html", "evidence/what-was-run.html"),
)
ASKED = {"laptop": "one-address.html", "why is it pending": "troubleshoot.html", "tool calls": "tools.html"}
"""What is typed into the search, and a page that it must offer."""
LINKS = "[...document.querySelectorAll('a[href]')].map(a => a.href)"
ANCHORS = "[...document.querySelectorAll('[id], a[name]')].map(e => e.id || e.name)"
TOO_WIDE = "document.documentElement.scrollWidth - window.innerWidth"
QUESTIONS = """[...document.querySelectorAll('article table')].flatMap(t => [...t.querySelectorAll('tr')].map(
    r => [...r.children].map(c => c.innerText.trim())))"""


class Look:
    """One look at a site: what is wrong, and how much was looked at."""

    def __init__(self, site: Path, pictures: Path | None) -> None:
        self.site = site
        self.pictures = pictures
        self.pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")
        self.wrong: list[str] = []
        self.counted: Counter[str] = Counter()
        self.links: dict[str, list[str]] = {}
        self.anchors: dict[str, set[str]] = {}

    def all(self, browser: Browser) -> None:
        for scheme in SCHEMES:
            context = browser.new_context(color_scheme=scheme)  # type: ignore[arg-type]
            page = context.new_page()
            for name in self.pages:
                self.open(page, name, scheme)
            context.close()
        self.follow_links()
        context = browser.new_context(viewport={"width": 1400, "height": HEIGHT})
        self.search(context.new_page())
        self.click_to_answers(context.new_page())
        context.close()

    def open(self, page: Page, name: str, scheme: str) -> None:
        """Open a page at all widths."""
        found: list[str] = []

        def on_console(message: Any) -> None:
            if message.type in ("error", "warning"):
                found.append(f"console: {message.text}")

        def on_request(request: Any) -> None:
            if urlparse(request.url).scheme not in ("file", "data", "blob"):
                found.append(f"request: {request.url}")

        handlers = {
            "console": on_console,
            "pageerror": lambda error: found.append(f"error: {error}"),
            "request": on_request,
            "requestfailed": lambda request: found.append(f"missing: {request.url}"),
        }
        for event, handler in handlers.items():
            page.on(event, handler)  # type: ignore[call-overload]
        page.goto(self.address(name))
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": HEIGHT})
            self.counted["views"] += 1
            try:
                page.wait_for_function(f"{TOO_WIDE} <= 0", timeout=3_000)  # the page draws its menu anew first
            except TimeoutError:
                found.append(f"{page.evaluate(TOO_WIDE)} px wider than {width} px")
            if self.pictures and name in IN_PICTURES:
                stem = name.removesuffix(".html").replace("/", "-")
                page.screenshot(path=self.pictures / f"{stem}-{width}-{scheme}.png")
        for event, handler in handlers.items():
            page.remove_listener(event, handler)
        self.wrong += [f"{name} ({scheme}): {one}" for one in found]
        self.links[name] = page.evaluate(LINKS)
        self.anchors[name] = set(page.evaluate(ANCHORS))

    def follow_links(self) -> None:
        """Look whether each link within the site leads to a page, and each anchor to a place there."""
        for name, links in self.links.items():
            for link in set(links):
                address, anchor = urldefrag(link)
                parts = urlparse(address)
                if parts.scheme != "file":
                    continue
                self.counted["links"] += 1
                target = Path(unquote(parts.path))
                inside = str(target.relative_to(self.site)) if target.is_relative_to(self.site) else ""
                if not target.exists() or not inside:
                    self.wrong.append(f"{name}: link to {address}")
                elif anchor and unquote(anchor) not in self.anchors.get(inside, ()):
                    self.wrong.append(f"{name}: no place #{anchor} in {inside}")

    def search(self, page: Page) -> None:
        """Type into the search, as a person without a network would."""
        for words, wanted in ASKED.items():
            page.goto(self.address("index.html"))
            page.click("input[data-md-component='search-query']")
            page.keyboard.type(words)
            try:
                page.wait_for_selector(f".md-search-result__link[href*='{wanted}']", timeout=15_000, state="attached")
            except TimeoutError:
                self.wrong.append(f"search: {words!r} does not offer {wanted}")
            self.counted["searches"] += 1

    def click_to_answers(self, page: Page) -> None:
        """Follow the two clicks that the home page names for each question: a tab, then an entry of its menu."""
        page.goto(self.address("index.html"))
        rows = [row for row in page.evaluate(QUESTIONS) if row and row[0].endswith("?")]
        for question, path, *_ in rows:
            for way in path.split("; "):
                tab, entry = way.rpartition(":")[2].strip().split(", ", 1)
                page.goto(self.address("index.html"))
                try:
                    page.click(f".md-tabs__link:text-is('{tab}')", timeout=5_000)
                    page.click(f".md-sidebar--primary .md-nav__link:has-text('{entry}')", timeout=5_000)
                except TimeoutError:
                    self.wrong.append(f"{question} no entry {entry!r} below {tab!r}")
                self.counted["ways to answers"] += 1
        if len(rows) != 12:
            self.wrong.append(f"the home page has {len(rows)} questions, not 12")

    def address(self, name: str) -> str:
        return (self.site / name).as_uri()


def told(look: Look) -> Iterator[str]:
    yield from look.wrong
    counts = ", ".join(f"{count} {what}" for what, count in look.counted.items())
    yield f"{len(look.pages)} pages, light and dark: {counts}; wrong: {len(look.wrong)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    parser.add_argument("--chromium", default="/usr/bin/chromium", metavar="PROGRAM")
    options = parser.parse_args()
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    look = Look(options.site.resolve(), options.pictures)
    with sync_playwright() as playwright:
        # Chromium's own sandbox cannot be had by root; the pages are our own.
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        look.all(browser)
        version = browser.version
        browser.close()
    for line in told(look):
        print(re.sub(r"\s+", " ", line))
    print(f"Chromium {version}")
    return 1 if look.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
