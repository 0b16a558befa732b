"""The pages of a server: /docs, all routes with their fields, without scripts; and /, to try the models."""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from regard.serve.service import Service
from regard.viewer.page.html import render_page
from regard.viewer.page.text_scene import Scene

_STYLE = """
:root { font: 16px/1.5 system-ui, sans-serif; color-scheme: light dark; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; }
code { font: 0.95em ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid GrayText; padding: .2rem .6rem .2rem 0; text-align: left; vertical-align: top; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def make_docs_router(service: Service) -> APIRouter:
    """The route of the page."""
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        page = render_docs(request.app.openapi())
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})

    return router


def render_docs(schema: Mapping[str, Any]) -> str:
    """An OpenAPI description as a page.

    >>> operation = {"tags": ["Status"], "description": "Whether the process runs."}
    >>> page = render_docs({"info": {"title": "Regard", "version": "1"}, "paths": {"/health": {"get": operation}}})
    >>> "<code>GET /health</code>" in page
    True
    """
    sections: dict[str, list[str]] = {}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            lines = [f"<h3><code>{method.upper()} {escape(path)}</code></h3>"]
            lines.append(f"<p>{escape(operation.get('description', ''))}</p>")
            contents = operation.get("requestBody", {}).get("content", {})
            if contents:
                lines.append(f"<p>Body: {' or '.join(f'<code>{escape(kind)}</code>' for kind in contents)}</p>")
                lines.append("<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>")
                lines += _rows(next(iter(contents.values()))["schema"], schema)
                lines.append("</table>")
            sections.setdefault(operation.get("tags", ["Other"])[0], []).extend(lines)
    info = schema["info"]
    title = escape(f"{info['title']} {info['version']}")
    body = "\n".join(f"<h2>{escape(tag)}</h2>\n" + "\n".join(lines) for tag, lines in sections.items())
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n'
        f"<p>{escape(info.get('description', ''))} The same for programs: "
        f'<a href="/openapi.json">/openapi.json</a></p>\n{body}\n</main>\n</body>\n</html>\n'
    )


def _rows(body: Mapping[str, Any], schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A row for every field of an object, and for the fields of the objects in it."""
    body = _resolve(body, schema)
    for name, field in body.get("properties", {}).items():
        is_required = name in body.get("required", ())
        default = "required" if is_required else _value(field["default"]) if field.get("default") else ""
        cells = (f"<code>{escape(prefix + name)}</code>", escape(_type(field, schema)), escape(default))
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in (*cells, escape(field.get('description', ''))))}</tr>"
        for variant in (field, *field.get("anyOf", ())):
            yield from _rows(variant.get("items", variant), schema, f"{prefix}{name}.")


def _resolve(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = part.get("$ref", "").rpartition("/")[2]
    return schema["components"]["schemas"][name] if name else part


def _type(part: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """The type of a field in words.

    >>> _type({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}, {})
    'string or list of string'
    """
    part = _resolve(part, schema)
    choices = part.get("anyOf", part.get("oneOf"))
    if choices:
        return " or ".join(_type(choice, schema) for choice in choices if choice.get("type") != "null")
    if "enum" in part or "const" in part:
        return " or ".join(map(_value, part.get("enum", [part.get("const")])))
    if part.get("type") == "array":
        return f"list of {_type(part['items'], schema)}" if "items" in part else "list"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {part[name]:g}" for name, sign in bounds.items() if name in part]
    return " ".join([part.get("type", "any"), *limits])


def _value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def make_page_router(service: Service) -> APIRouter:
    """The route of the page."""
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        content, policy = _page_and_policy()
        headers = {
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return HTMLResponse(content, headers=headers)

    return router


@cache
def _page_and_policy() -> tuple[str, str]:
    """The page and its content security policy: only its own script, and that of the viewer, may run."""
    folder = files("regard.serve") / "web"
    script = (folder / "try_page.js").read_text(encoding="utf-8")
    page = (folder / "try_page.html").read_text(encoding="utf-8").replace("/* SCRIPT */", script)
    inline = re.findall(r"(?s)<script[^>]*>(.*?)</script>", page)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
    # The page of the viewer is shown in a frame, which inherits this policy.
    viewer = re.findall(r"'sha256-([^']+)'", render_page(Scene({"title": ""}, [])).decode())
    sources = " ".join(f"'sha256-{digest}'" for digest in [*hashes, *viewer])
    policy = (
        f"default-src 'none'; script-src {sources} 'wasm-unsafe-eval'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data: blob:; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy
