"""Talks to a gateway on its page in Chromium, and says what is wrong: talk.py URL [--pictures FOLDER]

The page is opened light and dark, at 400 and 1,000 pixels. A question is asked and its stream shown, another stopped.
Wrong are: an error of the console, a request to another host, a page wider than its window, and an answer that does not
come or does not stop. The gateway asks for no key, and its service takes a second or more for an answer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

WIDTHS = (400, 1000)
SCHEMES = ("light", "dark")
PATIENCE_S = 60.0


def until(seen: Callable[[], Any]) -> None:
    """Wait until something is seen. The page's own policy forbids the waits that playwright would run in it."""
    ends_s = time.monotonic() + PATIENCE_S
    while not seen():
        if time.monotonic() > ends_s:
            raise TimeoutError("the page does not show what it should")
        time.sleep(0.05)


def talk(browser: Browser, url: str, scheme: str, width: int, pictures: Path | None) -> list[str]:
    """Return what is wrong in one talk."""
    wrong: list[str] = []
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 700})  # type: ignore[arg-type]
    page = context.new_page()
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(url) else wrong.append(f"asked {asked.url}"))
    page.goto(url)
    page.locator("#send:not([disabled])").wait_for()
    page.fill("#question", "Why is the sky <b>blue</b>?")
    page.keyboard.press("Enter")
    until(lambda: "tokens, " in page.inner_text("#talk"))
    if "<b>blue</b>" not in page.locator("article.user").inner_text():
        wrong.append("what is typed is not shown as text")
    page.fill("#question", "And again?")
    page.click("#send")
    until(lambda: len(page.locator("article.assistant").last.inner_text()) > 20)
    page.click("#send")
    until(lambda: page.locator("article.assistant").last.inner_text().endswith("stopped"))
    for box in page.locator("header, #talk, #ask").all():
        place = box.bounding_box()
        if place and place["x"] + place["width"] > width:
            wrong.append(f"wider than {width} pixels")
    if pictures is not None:
        page.screenshot(path=pictures / f"talk-{scheme}-{width}.png")
    context.close()
    return [f"{scheme}, {width} pixels: {one}" for one in wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
    wrong = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        for scheme in SCHEMES:
            for width in WIDTHS:
                wrong += talk(browser, options.url, scheme, width, options.pictures)
        browser.close()
    print("\n".join(wrong) or f"{len(SCHEMES) * len(WIDTHS)} talks, nothing wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
