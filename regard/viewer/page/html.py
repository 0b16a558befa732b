"""A scene as one self-contained HTML file with the JavaScript module, the header and the blobs; it fetches nothing.

Texts and names cannot inject markup: in the JSON header `<`, `>` and `&` are escaped, blobs are base64, and the content
security policy allows no script but the module and, with a model, the worker that the page starts from its own text.
"""

import base64
import hashlib
import html
import json
import re
import unicodedata
import zlib
from dataclasses import dataclass
from typing import Any

from regard.errors import RegardError
from regard.version import __version__
from regard.viewer.page.text_scene import Scene
from regard.viewer.trace.computation import PageTensor
from regard.viewer.web import module

MAX_BYTES = 400 << 20
# 'wasm-unsafe-eval' allows WebAssembly, which computes the maps; it does not allow JavaScript from strings.
_POLICY = (
    "default-src 'none'; script-src 'sha256-{hash}' 'wasm-unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; worker-src {worker}; connect-src {connect}; base-uri 'none'; form-action 'none'"
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
<main id="regard"><noscript>This page needs JavaScript.</noscript></main>
"""
# Otherwise browsers request /favicon.ico.
_NO_ICON = '<link rel="icon" href="data:,">\n'


@dataclass(frozen=True, eq=False)
class PageModel:
    """A model that runs inside a page: a JSON header and the weights that it refers to (see model.py)."""

    header: dict[str, Any]
    weights: bytes
    tensors: dict[str, PageTensor]
    """the parameters of `forward`"""


def render_page(scene: Scene, model: PageModel | None = None) -> bytes:
    """The HTML file of a scene, encoded as UTF-8; with a model, the page runs new input.

    >>> b'<script type="text/plain" id="blob-0">MTIz</script>' in render_page(Scene({"title": "1 < 2"}, [b"123"]))
    True
    """
    size = (sum(len(blob) for blob in scene.blobs) + (0 if model is None else len(model.weights))) * 4 // 3
    if size > MAX_BYTES:
        raise RegardError(
            f"The page would have {size >> 20} MB, more than most browsers can open.",
            "Select fewer attentions (--layers), a shorter text, or --no-with-model.",
        )
    parts = [f'<script type="application/json" id="scene">{_json(scene.header)}</script>\n'.encode()]
    for index, blob in enumerate(scene.blobs):
        parts += [b'<script type="text/plain" id="blob-%d">' % index, base64.b64encode(blob), b"</script>\n"]
    if model is None:
        return _wrap(parts, scene.header["title"])
    summary = {name: model.header[name] for name in ("fields", "precision", "change", "head", "tensors")}
    parts.append(f'<script type="application/json" id="model">{_json(summary)}</script>\n'.encode())
    full = json.dumps(model.header | {"trace": scene.trace_template}, separators=(",", ":"), allow_nan=False)
    header = base64.b64encode(zlib.compress(full.encode(), 9))
    texts = {"header": header, "weights": base64.b64encode(model.weights)}
    for name, text in texts.items():
        parts += [f'<script type="text/plain" id="model-{name}">'.encode(), text, b"</script>\n"]
    return _wrap(parts, scene.header["title"], has_model=True)


def render_live_page(title: str) -> bytes:
    """The HTML file of a live page, which requests its scene from its own server.

    >>> b"connect-src 'self'" in render_live_page("Regard")
    True
    """
    return _wrap([], title, connect="'self'", more=_NO_ICON)


def _checked(script: str) -> str:
    if re.search(r"</script|<!--|[\r\0]", script, re.IGNORECASE):
        raise ValueError("The JavaScript module contains text that would end its script element.")
    return script


def _wrap(parts: list[bytes], title: str, connect: str = "'none'", has_model: bool = False, more: str = "") -> bytes:
    """The complete HTML file: the data first, then the module; the worker of a model runs the text of the module."""
    script = _checked(f"{module(has_model)}\nif (globalThis.document) openPage();\n")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    top = _PAGE.format(
        policy=_POLICY.format(hash=digest, connect=connect, worker="blob:" if has_model else "'none'"),
        version=__version__,
        title=html.escape(_printable(title)),
        more=more,
    )
    return b"".join([top.encode(), *parts, f'<script type="module">{script}</script>\n</body>\n</html>\n'.encode()])


def _json(header: dict[str, Any]) -> str:
    """ASCII JSON without characters that are special in HTML."""
    text = json.dumps(header, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _printable(title: str) -> str:
    """A title in which control characters, line separators and surrogates, invalid in HTML, are spaces."""
    invalid = ("Cc", "Cs", "Zl", "Zp")
    return "".join(" " if unicodedata.category(char) in invalid else char for char in title)
