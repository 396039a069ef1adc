"""Goes on talking to a gateway's page in Chromium until its file is there: talk_on.py URL FILE

Prints a line as JSON after each answer: how many came, and how long the last one is. Exits with 1 if one does not come,
and names an error of the console or a request to another host.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

PATIENCE_S = 180.0


def main() -> int:
    url, file = sys.argv[1], Path(sys.argv[2])
    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda asked: None if asked.url.startswith(url) else wrong.append(f"asked {asked.url}"))
        page.goto(url)
        page.locator("#send:not([disabled])").wait_for(timeout=1e3 * PATIENCE_S)
        count = 0
        while not file.exists() and not wrong:
            page.fill("#question", f"Question {count}")
            page.keyboard.press("Enter")
            ends_s = time.monotonic() + PATIENCE_S
            while "tokens, " not in (answer := page.locator("article.assistant").last.inner_text()):
                if time.monotonic() > ends_s:
                    wrong.append(f"no answer: {answer}")
                    break
                time.sleep(0.1)
            if not wrong:
                count += 1
                print(json.dumps({"answers": count, "characters": len(answer)}), flush=True)
            page.reload()
            page.locator("#send:not([disabled])").wait_for(timeout=1e3 * PATIENCE_S)
        browser.close()
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
