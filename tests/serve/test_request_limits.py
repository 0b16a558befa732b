"""Requests that are small to send and expensive to serve: phrases, images, recordings of attention, long responses."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from regard.decode import DecodeConfig
from regard.decode.protocol import check_interruption, interruptible
from regard.errors import RegardError
from regard.serve import scheduler as scheduler_module
from regard.serve.errors import DeadlineExceeded, Overloaded
from regard.serve.limits import ServeLimits
from regard.serve.routes import responses
from regard.serve.routes.libretranslate import split_html
from regard.serve.routes.responses import json_response
from regard.serve.scheduler import Scheduler
from regard.serve.service import decode_images
from tests.serve.test_scheduler import scheduler as scheduler


def encode_png(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("phrases", "message"),
    [
        ({"forbidden": ["x"] * 65}, "65 forbidden phrases; at most 64"),
        ({"required": ["x"] * 33}, "33 required phrases; at most 32"),
        ({"forbidden": ["x" * 2001]}, "2001 characters in its phrases; at most 2000"),
        ({"required": ["x" * 1500], "forbidden": ["x" * 501]}, "2001 characters in its phrases; at most 2000"),
        ({"prefixes": ["x" * 4000]}, "4003 characters; at most 4000"),
    ],
)
def test_phrases_count(server, phrases, message):
    status, content = server.request("/api/translate", {"model": "numbers", "texts": ["one"], **phrases})
    assert (status, message in content["error"]) == (413, True)
    if list(phrases) == ["forbidden"]:
        body = {"model": "letters", "prompts": ["one"], **phrases}
        assert server.request("/api/generate", body)[0] == 413


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/translate", {"q": "- " * 60, "source": "en", "target": "fr"}),
        ("/api/translate", {"model": "numbers", "texts": ["one", "- " * 60]}),
        ("/api/generate", {"model": "letters", "prompts": ["- " * 60]}),
        ("/v1/completions", {"model": "letters", "prompt": "- " * 60}),
        ("/v1/completions", {"model": "letters", "prompt": [5] * 60}),
        ("/v1/completions", {"model": "letters", "prompt": [5] * 60, "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/embeddings", {"model": "moods", "input": "- " * 60}),
        ("/api/classify", {"model": "moods", "texts": [["one", "- " * 60]]}),
        ("/api/score", {"model": "numbers", "pairs": [["one", "- " * 60]]}),
        ("/api/attention", {"model": "numbers", "text": "- " * 60, "format": "arrays"}),
    ],
)
def test_long_sources_are_not_encoded(server, monkeypatch, path, body):
    """Encoding one takes quadratic time, in which nothing else is decoded, and no deadline is honored."""
    monkeypatch.setattr(server.service, "limits", dataclasses.replace(server.service.limits, max_source_tokens=50))
    status, content = server.request(path, body)
    assert (status, "tokens; at most 50 are allowed. Split it." in str(content)) == (413, True)


def test_the_largest_phrases_take_little_time(local):
    """One phrase of 2000 characters, all different: the automaton is built in linear time."""
    for phrase in ("".join(map(chr, range(0x4E00, 0x4E00 + 2000))), "ab " * 666):
        start = time.process_time()
        local["numbers"].prepare(["one"], forbidden=[phrase])
        assert time.process_time() - start < 5  # it was more than a minute


class Steps:
    """A search that never ends, one step at a time."""

    def __init__(self) -> None:
        self.started, self.ended = threading.Event(), threading.Event()

    def __call__(self, inputs: list) -> list:
        self.started.set()
        try:
            while True:
                check_interruption()
                time.sleep(0.001)
        finally:
            self.ended.set()


def test_calls_that_run_alone_have_deadlines_and_block_nothing(scheduler, transformer):
    steps = Steps()
    slow = scheduler.call(("look",), steps, [0], timeout=1.0, is_alone=True)
    assert steps.started.wait()
    assert scheduler.submit(transformer.prepare(["one two"])).result()
    assert scheduler.call(("double",), lambda values: [2 * value for value in values], [2]).result() == [4]
    assert scheduler.call(("look",), lambda values: values, [3], is_alone=True).result() == [3]
    with pytest.raises(DeadlineExceeded):
        slow.result()
    assert steps.ended.wait()
    cancelled = Steps()
    future = scheduler.call(("look",), cancelled, [0], is_alone=True)
    assert cancelled.started.wait()
    future.cancel()
    assert cancelled.ended.wait()


def test_required_phrases_honor_deadlines(scheduler, transformer):
    """Other requests do not wait, and the search ends at the next step."""
    long = DecodeConfig(beam=4, min_len=3000, max_len=3000, max_extra=3000)
    future = scheduler.submit(transformer.prepare(["one two three"], long, required=["trois"]), timeout=1.0)
    assert scheduler.submit(transformer.prepare(["one two"])).result()
    with pytest.raises(DeadlineExceeded):
        future.result()
    # A side thread takes this one when the search has ended.
    blockers = [scheduler.call(("look",), lambda values: values, [i], is_alone=True) for i in range(3)]
    assert [blocker.result() for blocker in blockers] == [[0], [1], [2]]
    assert scheduler.close()


def test_phrases_are_planned_and_matched_in_steps(transformer):
    """One step of a search can take long: the number of plans is exponential, and each table has the vocabulary."""
    request = transformer.prepare(["one"], required=["deux trois", "un"], forbidden=["quatre"])
    (constraints,) = request.encoded.lexical
    steps = []
    with interruptible(lambda: steps.append(1)):
        constraints.planned_tokens(constraints.start_state)
        assert len(steps) > 2
        steps.clear()
        constraints.moves(constraints.start_state)
        assert len(steps) > 2  # of each phrase

    def stop():
        raise TimeoutError

    constraints.clear_caches()
    with interruptible(stop), pytest.raises(TimeoutError):
        request.decode()
    assert not constraints._moves  # the tables of an interrupted search are freed
    assert request.decode()


def test_recordings_of_attention_are_refused_at_the_capacity():
    scheduler = Scheduler(latency_target=0.1)
    blocker, accepted = threading.Event(), []
    try:
        with contextlib.suppress(Overloaded):
            for _ in range(1000):
                accepted.append(scheduler.call(("look",), lambda _: [blocker.wait()], [0], is_alone=True))
        assert scheduler_module.MIN_ITEMS <= len(accepted) < 20
        blocker.set()
        for future in accepted:
            future.result()
        assert set(scheduler._meters) == {"look"}
        assert set(scheduler._outstanding) == {"look"}
    finally:
        blocker.set()
        scheduler.close()


def test_image_bombs(server):
    """28 kB of PNG with 177 million pixels, and many images that are each below the limit."""
    bomb = encode_png(13300, 13300)
    assert len(bomb) < 40_000
    for path, body in (
        ("/api/classify", {"model": "animals", "images": [bomb]}),
        ("/api/attention", {"model": "animals", "image": bomb}),
    ):
        status, content = server.request(path, body)
        assert (status, "image 1: the image has more than 89 million pixels" in content["error"]) == (422, True)
    many = [encode_png(5000, 5000)] * 3
    with pytest.raises(RegardError, match="more than 50000000 pixels"):
        decode_images(many, ServeLimits().max_pixels)
    assert [image.size for image in decode_images(many[:2], ServeLimits().max_pixels)] == [(5000, 5000)] * 2


def test_many_values_are_not_read(server):
    limits = ServeLimits()
    limits.check_values(json.dumps({"texts": ["," * 20_000]}).encode())
    limits.check_values(json.dumps({"image": "x" * 1_000_000}).encode())
    for body in (b"[" * 40_000, b'{"texts":[' + b"1," * 40_000, b'{"a":' * 40_000):
        status, content = server.request("/api/translate", body)
        assert (status, "more than 14000 values" in content["error"]) == (413, True)


def test_names_are_bounded(server):
    for path, field in (("/api/translate", "model"), ("/api/translate", "to"), ("/translate", "target")):
        body = {"texts": ["one"], "q": "one", "source": "en", "target": "fr", field: "x" * 100_000}
        wanted = ("texts", field) if path.startswith("/api") else ("q", "source", "target")
        status, content = server.request(path, {name: body[name] for name in wanted})
        assert status in (400, 422)
        assert "at most 300 characters" in content["error"]


def test_html_takes_linear_time():
    for source in ("<!--" * 50_000, "<pre>" * 50_000):
        start = time.process_time()
        split_html(source)
        assert time.process_time() - start < 5  # it was several minutes
    assert split_html("<!-- a <b>c</b>")[0] == ["<!-- a", "c"]
    assert split_html("<PRE>a</pre> b <code>c")[0] == ["b", "c"]


def test_long_responses_leave_the_event_loop_free(monkeypatch):
    """Arrays are written by another thread, in pieces, while the loop runs."""
    weights = np.random.default_rng(0).random((4, 200, 200)).astype(np.float32)
    written, sizes = [], []
    dump = responses._dump

    def noted_dump(value):
        written.append(threading.current_thread())
        sizes.append(len(value) if isinstance(value, list) else 1)
        return dump(value)

    monkeypatch.setattr(responses, "_dump", noted_dump)
    response = asyncio.run(json_response({"model": "m", "weights": weights, "bad": [1.0, float("nan")], "none": []}))
    content = json.loads(response.body)
    assert np.array_equal(np.array(content["weights"], np.float32), weights)
    assert (content["bad"], content["none"]) == ([1.0, None], [])
    assert max(sizes) <= 1000
    own = [thread for thread in written if thread is threading.current_thread()]
    assert len(own) < len(written) / 10


def test_attention_arrays(server, local):
    body = {"model": "numbers", "text": "one two three", "format": "arrays"}
    with ThreadPoolExecutor(4) as pool:
        contents = list(pool.map(lambda _: server.post("/api/attention", body), range(4)))
    assert all(content == contents[0] for content in contents)
    for one in contents[0]["maps"].values():
        assert np.array(one["weights"]).shape[1:] == (len(one["rows"]), len(one["columns"]))
