"""One HTML file that asks no host for anything and runs no script but its own.

What a model or a person wrote is hostile here: it comes in as `data`, or went through `text`. A policy in the file
admits the script and the style of the file by their digests, and nothing else, so that markup which slips through all
the same runs nothing and loads nothing. It admits no `style="..."` and no `onclick="..."` either: a script sets
`element.style` and adds listeners.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib import resources

from rl_core.run_dir import json_values

LONE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair: UTF-8 has no bytes for it."""
UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
"""What could end a script element, or a line of a script, or cannot be written as UTF-8."""
ENDS = re.compile(r"</(script|style)|<!--|<script|\r|\0", re.IGNORECASE)
"""What an inline script or style must not hold: the parser would end it there, or change its digest."""


def page(title: str, *, body: str = "", style: str = "", script: str = "",
         data: Mapping[str, object] | None = None) -> str:
    """A whole HTML document, to be written as UTF-8.

    `title`: text, escaped here. `body`: markup that is trusted, its variable parts went through `text`. `style`,
    `script`: those of the package, inline; the style comes behind page.css, whose variables follow the reader's light
    or dark scheme. `data`: JSON values, at `document.getElementById("data").textContent`; NaN and infinities are null.

    Example: `page("Answers", body="<main id=list></main>", script=asset("answers.js"), data={"rewards": [0.5, 1.0]})`.
    """
    styles, policy = asset("page.css") + style, "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:"
    for part in (styles, script):
        if (wrong := ENDS.search(part)) is not None:
            raise ValueError(f"{wrong.group()!r} inside of an inline style or script: it would end there; write it "
                             "in two pieces")
    policy += f"; style-src {_digest(styles)}" + (f"; script-src {_digest(script)}" if script else "")
    parts = [
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">', '<meta name="referrer" content="no-referrer">',
        f"<title>{text(title)}</title>", f"<style>{styles}</style>", "</head>", "<body>", body,
    ]
    if data is not None:
        parts.append(f'<script type="application/json" id="data">{json_in_html(data)}</script>')
    if script:
        parts.append(f"<script>{script}</script>")
    return "\n".join([*parts, "</body>", "</html>", ""])


def text(value: object) -> str:
    """Any value as text of a page: markup in it is shown, not obeyed, also inside of a quoted attribute."""
    return LONE.sub("\ufffd", html.escape(str(value), quote=True))


def json_in_html(data: Mapping[str, object]) -> str:
    """JSON that no parser of HTML ends early, and that parses to the same values.

    Example: `{"answer": "</script>"}` -> `{"answer":"\\u003c/script\\u003e"}`.
    """
    raw = json.dumps(json_values(dict(data)), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", raw)


def asset(name: str) -> str:
    """A `.js` or `.css` file that lies beside this one. Raises FileNotFoundError."""
    return resources.files("rl_core.pages").joinpath(name).read_text(encoding="utf-8")


def _digest(inline: str) -> str:
    """The name by which a policy admits an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
