"""A scene as one HTML file: the module, the header and the blobs are all inside, and nothing is ever fetched.

Whatever comes from a text or a model is text: in the header every `<`, `>` and `&` is written as an escape of JSON, a
blob is base64, and a policy in the page lets no script run but this one.
"""

import base64
import hashlib
import html
import json
import re
import unicodedata
from typing import Any

from regard.errors import RegardError
from regard.version import __version__
from regard.viewer.page.text_scene import Scene
from regard.viewer.web import module

MOST = 400 << 20
# 'wasm-unsafe-eval' lets WebAssembly run, which the module computes maps with; it allows no text to be run as script.
_POLICY = (
    "default-src 'none'; script-src 'sha256-{hash}' 'wasm-unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
)
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="Regard {version}">
<title>{title}</title>
{more}</head>
<body>
<main id="regard"><noscript>This page computes what it shows: please let it run its script.</noscript></main>
"""
# Browsers would ask a server for one.
_NO_ICON = '<link rel="icon" href="data:,">\n'


def page(scene: Scene) -> bytes:
    """The file's content, UTF-8.

    >>> b'<script type="text/plain" id="blob-0">MTIz</script>' in page(Scene({"title": "1 < 2"}, [b"123"]))
    True
    """
    size = sum(len(blob) for blob in scene.blobs) * 4 // 3
    if size > MOST:
        raise RegardError(
            f"The page would have {size >> 20} MB, which is more than browsers like to open.",
            "Look at fewer attentions (--layers), or at a shorter text.",
        )
    parts = [f'<script type="application/json" id="scene">{_json(scene.header)}</script>\n'.encode()]
    for number, blob in enumerate(scene.blobs):
        parts += [b'<script type="text/plain" id="blob-%d">' % number, base64.b64encode(blob), b"</script>\n"]
    return _around(parts, scene.header["title"])


def live_page(title: str) -> bytes:
    """The same without a scene, for which it asks the server that it came from, and nobody else.

    >>> b"connect-src 'self'" in live_page("Regard")
    True
    """
    return _around([], title, connect="'self'", more=_NO_ICON)


def _around(parts: list[bytes], title: str, connect: str = "'none'", more: str = "") -> bytes:
    """The whole page: the module after whatever it shows."""
    script = f"{module()}\nopenPage();\n"
    if re.search(r"</script|<!--|[\r\0]", script, re.IGNORECASE):
        raise ValueError("The module contains text that would end the script element around it.")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    top = _PAGE.format(
        policy=_POLICY.format(hash=digest, connect=connect),
        version=__version__,
        title=html.escape(_printable(title)),
        more=more,
    )
    return b"".join([top.encode(), *parts, f'<script type="module">{script}</script>\n</body>\n</html>\n'.encode()])


def _json(header: dict[str, Any]) -> str:
    """JSON in ASCII that holds nothing which means something to HTML."""
    text = json.dumps(header, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda sign: f"\\u{ord(sign[0]):04x}", text)


def _printable(title: str) -> str:
    """A title without what cannot stand in HTML: control characters, line ends, halves of characters."""
    unfit = ("Cc", "Cs", "Zl", "Zp")
    return "".join(" " if unicodedata.category(sign) in unfit else sign for sign in title)
