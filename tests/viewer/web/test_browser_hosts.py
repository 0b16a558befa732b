"""The live page and the widget in a browser: the module of a saved page, with a model that answers requests."""

import base64
import shutil
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from regard.pipelines import Translator
from regard.viewer import look
from regard.viewer.page import live_server, requests
from regard.viewer.page.live_server import LiveServer
from regard.viewer.page.requests import TextRequestHandler
from regard.viewer.page.text_scene import build_scene
from tests.viewer.browser import FLAGS, QUIET, axe_violations, hash_of, wait_for_announcement

CROSS = "#at=decoder.1.cross:1&as=table"
REFUSED = "Failed to load resource: the server responded with a status of"


@pytest.fixture
def served(transformer) -> Iterator[Callable[..., LiveServer]]:
    """Serves looks, and closes the servers at the end."""
    running = []

    def serve(*texts: str, port: int = 0) -> LiveServer:
        scene = build_scene(look(transformer, *texts)) if texts else None
        live = LiveServer(TextRequestHandler(transformer, "numbers"), scene, port)
        thread = Thread(target=live.serve_forever, args=(0.01,))
        thread.start()
        running.append((live, thread))
        return live

    yield serve
    for live, thread in running:
        live.shutdown()
        thread.join()
        live.server_close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens addresses. At the end, no page may have logged anything or contacted any server but its own."""
    complaints: list[str] = []
    requested: list[str] = []
    allowed = set()
    contexts = []

    def open_page(address: str, fragment: str = "") -> Any:
        context = browser.new_context(viewport={"width": 1360, "height": 900})
        contexts.append(context)
        context.set_default_timeout(240_000)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        allowed.add(urlsplit(address).netloc)
        page.goto(address + fragment)
        return page

    open_page.console_messages = complaints  # type: ignore[attr-defined]
    open_page.requested = requested  # type: ignore[attr-defined]
    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert {urlsplit(url).netloc for url in requested if not url.startswith(("data:", "blob:"))} <= allowed


def submit(page: Any, source: str, target: str | None = None) -> None:
    page.get_by_role("textbox", name="Sentence").fill(source)
    if target is not None:
        page.get_by_role("textbox", name="Translation").fill(target)
    page.keyboard.press("Enter")


def table(page: Any) -> np.ndarray:
    """The weights of a table on the page."""
    rows = page.locator("tbody tr").all()
    return np.array([[float(cell) for cell in row.locator("td").all_text_contents()] for row in rows])


# The live page


def test_new_sentence_replaces_the_scene(opened, served, transformer):
    page = opened(served("one two three", "trois deux un").address, CROSS)
    page.wait_for_selector(QUIET)
    assert page.locator("h1 .source").text_content() == "one two three"
    assert page.get_by_role("textbox", name="Sentence").input_value() == "one two three"
    first = look(transformer, "one two three", "trois deux un").maps["decoder.1.cross"].weights[1]
    np.testing.assert_allclose(table(page), first, rtol=1e-3, atol=1e-6)

    submit(page, "four five six seven")
    page.wait_for_selector("h1 .source:text-is('four five six seven')", state="attached")
    page.wait_for_selector(QUIET)
    seen = look(transformer, "four five six seven")
    assert page.locator("h1 .target").text_content() == seen.translation
    np.testing.assert_allclose(table(page), seen.maps["decoder.1.cross"].weights[1], rtol=1e-3, atol=1e-6)
    assert page.locator(".regard").count() == 1
    # The same head is shown in the same form, the field keeps the focus, and screen readers are informed.
    assert hash_of(page)["at"] == "decoder.1.cross:1"
    assert page.evaluate("document.activeElement.name") == "source"
    assert page.title() == seen.title.replace("  ", " ")
    wait_for_announcement(page, "four five six seven")

    submit(page, "one two", "deux deux un")
    page.wait_for_selector("h1 .target:text-is('deux deux un')", state="attached")
    page.wait_for_selector(QUIET)
    assert page.get_by_role("textbox", name="Translation").input_value() == "deux deux un"
    # After reloading, a tab shows its own latest request, and another tab the initial scene.
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("h1 .target:text-is('trois deux un')", state="attached")
    other.close()
    page.reload()
    page.wait_for_selector("h1 .target:text-is('deux deux un')", state="attached")
    assert sum(url.endswith("/request") for url in opened.requested) == 3
    # The sentence is visible once: in its field.
    assert page.locator("h1 .source").evaluate("one => one.getBoundingClientRect().width") <= 1


def test_page_without_a_sentence_shows_a_form(opened, served):
    page = opened(served().address)
    page.wait_for_selector(QUIET)
    assert page.locator("h1").text_content() == "Enter a sentence to see what the model attends to."
    page.get_by_role("textbox", name="Sentence").fill("one two three?")  # ? is not a shortcut in a text field
    page.get_by_role("button", name="Run").click()
    page.wait_for_selector("h1 .source:text-is('one two three?')", state="attached")
    page.wait_for_selector(QUIET)
    assert page.locator(".panel").count() > 0
    page.get_by_role("textbox", name="Sentence").press("?")
    assert page.locator("dialog[open]").count() == 0


def test_errors_are_shown_next_to_the_field(opened, served, monkeypatch):
    monkeypatch.setattr(Translator, "length_limit", 16)  # as with learned positions
    page = opened(served("one two", "deux un").address)
    page.wait_for_selector(QUIET)
    submit(page, "one " * 40)
    page.wait_for_selector("form[data-failed]")
    assert "the model supports at most 15" in page.locator(".request-status").text_content()
    assert page.locator("h1 .source").text_content() == "one two"
    assert [one.startswith(REFUSED) for one in opened.console_messages] == [True]
    submit(page, "one")
    page.wait_for_selector("h1 .source:text-is('one')", state="attached")
    page.wait_for_selector(QUIET)

    page.route("**/request", lambda route: route.abort())  # as if the server had been stopped
    submit(page, "two")
    page.wait_for_selector("form[data-failed]")
    assert page.locator(".request-status").text_content().startswith("The Regard server does not respond.")
    opened.console_messages.clear()


def test_last_submission_is_shown_and_typing_is_kept(opened, served, monkeypatch):
    """A second sentence is submitted and a third typed while the model runs on the first."""
    gate, run = Event(), requests.REQUESTS["look"]

    def wait_for_gate(handler, arguments):
        gate.wait(60)
        return run(handler, arguments)

    monkeypatch.setitem(requests.REQUESTS, "look", wait_for_gate)
    page = opened(served("one two", "deux un").address)
    page.wait_for_selector(QUIET)
    page.evaluate("""() => {
      window.shown = [];
      const note = () => window.shown.push(document.querySelector("h1 .source")?.textContent);
      new MutationObserver(note).observe(document.body, { childList: true, subtree: true });
    }""")
    submit(page, "one two three")
    submit(page, "four five")
    field = page.get_by_role("textbox", name="Sentence")
    field.fill("six seven")
    field.press("ArrowLeft")
    gate.set()
    page.wait_for_selector("h1 .source:text-is('four five')", state="attached")
    page.wait_for_selector(QUIET)
    assert "one two three" not in page.evaluate("window.shown")
    page.keyboard.type("x")
    assert field.input_value() == "six sevexn"
    page.reload()
    page.wait_for_selector("h1 .source:text-is('four five')", state="attached")


def test_overlong_input_gives_a_warning(opened, served, monkeypatch):
    page = opened(served("one two", "deux un").address)
    page.wait_for_selector(QUIET)
    assert page.locator(".request-status").text_content() == ""
    monkeypatch.setattr(Translator, "trained_length", 5)
    submit(page, "one two three four five", "un")
    page.wait_for_selector("h1 .source:text-is('one two three four five')", state="attached")
    assert page.locator(".request-status").text_content().startswith("The text has 6 tokens, more than any in training")


def test_restarted_server_is_reported_with_a_link(opened, served, monkeypatch):
    monkeypatch.setattr(live_server._HttpHandler, "timeout", 0.2)  # the end of a process closes its connections
    old = served("one two", "deux un")
    page = opened(old.address)
    page.wait_for_selector(QUIET)
    port = old.server_port
    old.shutdown()
    old.server_close()
    page.wait_for_timeout(1000)
    live = served("three", "trois", port=port)
    addresses: list[str] = []
    live.open_browser = addresses.append
    submit(page, "one")
    page.wait_for_selector("form[data-failed]")
    assert page.locator(".request-status").text_content().startswith("The Regard server was restarted")
    page.locator(".request-status a").click()
    page.wait_for_url("**/open")
    assert "opens in a new tab" in page.content()
    assert addresses == [live.address]
    live.open_browser = None
    with page.expect_console_message():  # of the status 403
        page.reload()
    assert "that the server printed" in page.content()
    assert live.token not in page.content()
    opened.console_messages.clear()


def test_live_page_shows_tokens_as_text(opened, served):
    page = opened(served("one two", "deux un").address)
    page.wait_for_selector(QUIET)
    hostile = "<img src=x onerror=alert(1)>"
    submit(page, "one", hostile)
    page.wait_for_selector("h1 .target:has-text('onerror')")
    page.wait_for_selector(QUIET)
    assert page.locator("h1 .target").text_content() == hostile
    assert page.locator("#regard img").count() == 0


def test_pages_of_other_origins_are_refused(opened, served, browser):
    """A page of another origin can neither read nor send requests, even if it knows the address."""
    live, other = served("one two", "deux un"), served("three", "trois")
    before = live.initial
    page = browser.new_page()
    answers = []
    page.on(
        "response", lambda answer: answers.append((answer.request.method, urlsplit(answer.url).path, answer.status))
    )
    page.route(
        f"{other.address}evil", lambda route: route.fulfill(body="<title>evil</title>", content_type="text/html")
    )
    page.goto(f"{other.address}evil")
    got = page.evaluate(
        """async (address) => {
          const body = JSON.stringify({ look: { source: "ten" } });
          const requests = [
            ["scene", {}],
            ["scene", { mode: "no-cors" }],
            ["request", { method: "POST", body, headers: { "Content-Type": "application/json" } }],
            ["request", { method: "POST", body, mode: "no-cors" }],
          ];
          const responses = requests.map(([path, options]) =>
            fetch(address + path, options).then((response) => response.text(), () => "nothing"));
          return Promise.all(responses);
        }""",
        live.address,
    )
    assert set(got) <= {"nothing", ""}
    page.evaluate(
        """(address) => {
          const form = document.createElement("form");
          Object.assign(form, { method: "post", action: address + "request", enctype: "text/plain" });
          document.body.append(form);
          form.submit();
        }""",
        live.address,
    )
    page.wait_for_url(f"{live.address}request")
    assert "Another page sent this request" in page.content()
    assert live.initial is before
    assert all(status in (403, 501) for _, path, status in answers if path.startswith(f"/{live.token}"))
    page.context.close()


def test_dns_rebinding_is_refused(served, browser):
    """DNS rebinding: evil.example resolves to this machine."""
    live = served("one two", "deux un")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    rule = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    program = browser.browser_type.launch(executable_path=path, args=[*FLAGS, rule])
    page = program.new_page()
    answer = page.goto(live.address.replace("127.0.0.1", "evil.example"))
    assert answer.status == 400
    assert "The Host header is not the address of this server." in answer.text()
    program.close()


@pytest.mark.parametrize("texts", [(), ("one two three", "trois deux un")])
def test_axe_finds_no_violations(opened, served, texts):
    assert axe_violations(opened(served(*texts).address)) == []


# The widget, in a page that implements anywidget's contract: a model with get, on, off and send, bytes as DataViews


NOTEBOOK = """async ([source, traits, blobs]) => {
  // Buffers are views into one message, at arbitrary offsets.
  const viewsOf = (texts) => {
    const parts = texts.map((text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0)));
    const whole = new Uint8Array(3 + parts.reduce((sum, part) => sum + part.length, 0));
    let at = 3;
    return parts.map((part) => {
      whole.set(part, at);
      at += part.length;
      return new DataView(whole.buffer, at - part.length, part.length);
    });
  };
  const listeners = new Set();
  const values = { ...traits, blobs: viewsOf(blobs) };
  const model = {
    get: (name) => values[name],
    on: (event, listener) => event === "msg:custom" && listeners.add(listener),
    off: (event, listener) => listeners.delete(listener),
    send: (content) => {
      if (window.silent === "dead") throw new Error("Kernel is dead");
      if (window.silent === true) return;
      return window.kernel(content).then((sent) => {
        window.heard = window.silent && sent.length;
        for (const [message, buffers] of window.silent ? sent.slice(0, 1) : sent) {
          for (const listener of [...listeners]) listener(message, viewsOf(buffers));
        }
      });
    },
  };
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const widget = (await import(url)).default;
  window.ends = [];
  for (const name of ["one", "two"]) {
    const el = document.createElement("div");
    el.id = name;
    document.body.append(el);
    window.ends.push(await widget.render({ model, el }));
  }
  window.listeners = listeners;
}"""


@pytest.fixture
def notebook(opened) -> Callable[..., Any]:
    """Renders the widget of a look twice in one page."""

    def show(seen: Any) -> Any:
        widget = seen.widget()
        sent: list[Any] = []
        widget.send = lambda content, buffers=None: sent.append((content, buffers or []))

        def kernel(content: Any) -> Any:
            sent.clear()
            widget._handle_custom_msg(content, [])
            return [(message, [base64.b64encode(one).decode() for one in buffers]) for message, buffers in sent]

        page = opened("about:blank")
        page.set_content('<!doctype html><html lang="en"><title>Notebook</title><body></body></html>')
        page.expose_function("kernel", kernel)
        traits = {"scene": widget.scene, "fields": widget.fields}
        page.evaluate(NOTEBOOK, [widget._esm, traits, [base64.b64encode(one).decode() for one in widget.blobs]])
        for name in ("one", "two"):
            page.wait_for_selector(f"#{name} {QUIET}")
        return page

    return show


def test_widget_shows_the_look_and_requests_another(notebook, transformer):
    seen = look(transformer, "one two three", "trois deux un")
    page = notebook(seen)
    one, two = page.locator("#one"), page.locator("#two")
    assert one.locator("h1 .source").text_content() == "one two three"
    for widget in (one, two):
        widget.locator("select.attention").first.select_option("decoder.0.cross")
        widget.locator("select.head").first.select_option("0")
        widget.locator(".figure").press("n")
        page.wait_for_selector(QUIET)
        np.testing.assert_allclose(table(widget), seen.maps["decoder.0.cross"].weights[0], rtol=1e-3, atol=1e-6)

    one.get_by_role("textbox", name="Sentence").fill("four five six")
    one.get_by_role("button", name="Run").click()
    page.wait_for_selector("#one h1 .source:text-is('four five six')", state="attached")
    page.wait_for_selector(f"#one {QUIET}")
    after = look(transformer, "four five six")
    assert one.locator("h1 .target").text_content() == after.translation
    # The same figure as before; the other widget is unchanged, and the notebook's address is not touched.
    np.testing.assert_allclose(table(one), after.maps["decoder.0.cross"].weights[0], rtol=1e-3, atol=1e-6)
    assert two.locator("h1 .source").text_content() == "one two three"
    assert page.evaluate("location.href") == "about:blank"

    one.get_by_role("textbox", name="Sentence").fill(" ")
    one.get_by_role("button", name="Run").click()
    page.wait_for_selector("#one form[data-failed]")
    assert one.locator(".request-status").text_content().startswith("The text is empty")
    # Everything is cleaned up.
    assert page.evaluate("window.listeners.size") == 0
    page.evaluate("window.ends.forEach((end) => end())")
    assert page.locator(".regard").count() == 0


def test_unresponsive_kernel_is_reported(notebook, transformer):
    """After a timeout the page shows what to do; a kernel that has acknowledged the request has no time limit."""
    page = notebook(look(transformer, "one two", "deux un"))
    one = page.locator("#one")
    page.clock.install()

    def request_without_response() -> None:
        one.get_by_role("textbox", name="Sentence").fill("four")
        one.get_by_role("button", name="Run").click()
        page.wait_for_selector("#one .request-status:text('Running')")

    page.evaluate("window.silent = true")
    request_without_response()
    page.clock.fast_forward(9_000)
    assert one.locator(".request-status").text_content() == "Running …"
    page.clock.fast_forward(1_500)
    page.wait_for_selector("#one form[data-failed]")
    assert "run this cell again" in one.locator(".request-status").text_content()
    assert page.evaluate("window.listeners.size") == 0

    page.evaluate("window.silent = 'after acknowledging'")
    request_without_response()
    page.wait_for_function("() => window.heard")
    page.clock.fast_forward(60_000)
    assert one.locator(".request-status").text_content() == "Running …"

    page.evaluate("window.silent = 'dead'")
    page.locator("#two").get_by_role("button", name="Run").click()
    page.wait_for_selector("#two form[data-failed]")
    assert "does not respond" in page.locator("#two .request-status").text_content()


def test_every_view_fits_into_a_narrow_cell_of_a_wide_window(notebook, transformer):
    page = notebook(look(transformer, "one two three"))
    one = page.locator("#one")
    for width, count in ((1280, 2), (520, 1)):
        page.evaluate("width => (document.getElementById('one').style.width = `${width}px`)", width)
        for view, columns in (
            ("Attention", ".columns"),
            ("Step by step", ".token-side"),
            ("Experiment", ".experiment"),
        ):
            one.get_by_role("tablist", name="View").get_by_role("tab", name=view, exact=True).click()
            page.wait_for_selector(f"#one {columns}:visible")
            page.wait_for_selector(f"#one {QUIET}")
            tracks = one.locator(columns).first.evaluate("one => getComputedStyle(one).gridTemplateColumns")
            assert min(2, len(tracks.split())) == count, (view, width)
            assert one.locator(".regard").evaluate("one => one.scrollWidth - one.clientWidth") <= 0, (view, width)
