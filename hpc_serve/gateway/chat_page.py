"""The page on which a person talks to the services of a gateway: one file, which asks no other host. Pure.

Its script (chat_page.js) asks the gateway as any client does. The page itself holds nothing secret.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from markupsafe import Markup

from hpc_serve.pages.frame import document

PAGE_HEADERS = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
"""No other page may show this one inside of it."""
_HERE = Path(__file__).parent
_BODY = Markup(
    '<header><b>hpc-serve</b><label>Model <select id="model"></select></label>'
    '<button id="new" type="button">New talk</button></header>'
    '<form id="key" hidden><label for="given">This gateway asks for its key.</label>'
    '<input id="given" type="password" autocomplete="off"><button>Use it</button></form>'
    '<main id="talk" aria-live="polite"></main>'
    '<form id="ask"><textarea id="question" rows="2" aria-label="Question" placeholder="Ask something" autofocus>'
    '</textarea><button id="send" disabled>Send</button></form>'
)


@cache
def chat_page() -> bytes:
    """Return the page, in UTF-8."""
    style, script = ((_HERE / f"chat_page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return document("hpc-serve", _BODY, style=style, script=script, asks_its_host=True).encode()
