"""The page to try the models of a server, with the viewer in it."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from regard.serve.service import Service
from regard.viewer.page.html import render_page
from regard.viewer.page.text_scene import Scene


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
