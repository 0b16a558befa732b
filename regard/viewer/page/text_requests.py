"""What a page may ask of a model, in the live page and in a notebook: a table of names to functions.

A request is JSON with one name and what belongs to it, `{"look": {"source": "The cat sleeps."}}`. Whoever adds a
request writes a function and puts it into `REQUESTS`; both hosts, and their errors, come by themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

from regard.errors import RegardError
from regard.models import family_of
from regard.pipelines import LanguageModel, TextEncoder, Translator
from regard.version import __version__
from regard.viewer.experiments import answer as tried_out
from regard.viewer.page.text_scene import FORMAT, Scene, scene_of
from regard.viewer.text_look import Layers, look


class Answer(NamedTuple):
    """JSON for the page, and the bytes that it names by their numbers. A new scene is called "scene"."""

    told: dict[str, Any]
    blobs: list[bytes]


@dataclass(frozen=True, eq=False)
class Desk:
    """A model that answers a page's requests, one at a time."""

    bundle: Translator | LanguageModel | TextEncoder
    name: str = ""
    """what the page calls the model"""
    layers: Layers = None
    """the attentions to look at, where not all"""
    truncate: bool = False
    lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def fields(self) -> list[str]:
        """The texts that it takes."""
        if isinstance(self.bundle, Translator):
            return ["source", "target"]
        answers = isinstance(self.bundle, TextEncoder) and self.bundle.model.config.head == "answer"
        return ["source", "context"] if answers else ["source"]

    def see(self, texts: dict[str, str]) -> Scene:
        """What was regarded in texts that were written into the fields."""
        target = texts.get("target", "").strip() or None  # a field that was left empty is none
        context = texts.get("context", "").strip() or None
        options: dict[str, Any] = dict(layers=self.layers, name=self.name, truncate=self.truncate)
        return scene_of(look(self.bundle, texts["source"], target, context=context, **options))

    def answer(self, request: Any) -> Answer:
        """Does what is asked; a RegardError for a request that makes no sense."""
        match request:
            case dict() if len(request) == 1 and (name := next(iter(request))) in REQUESTS:
                with self.lock:
                    return REQUESTS[name](self, request[name])
        raise RegardError("This is nothing that a page can ask.", f"It can ask for: {', '.join(REQUESTS)}.")

    def blank(self) -> Scene:
        """The scene before anything was looked at."""
        return Scene(
            {
                "format": FORMAT,
                "title": self.name,
                "model": {"family": family_of(self.bundle.model.config), "name": self.name, "regard": __version__},
                "texts": {"source": "", "target": ""},
                "opens": None,
                "sides": {},
                "attentions": [],
                "links": None,
            },
            [],
        )


def _look(desk: Desk, wanted: Any) -> Answer:
    """A sentence, and a translation or else the model's own: what was regarded."""
    if not isinstance(wanted, dict) or "source" not in wanted or not set(wanted) <= set(desk.fields):
        raise RegardError("This is nothing to look at.", f"Give a text as {', or as well '.join(desk.fields)}.")
    scene = desk.see({name: _text(text, name) for name, text in wanted.items()})
    return Answer({"scene": scene.header}, scene.blobs)


def _try(desk: Desk, wanted: Any) -> Answer:
    """Changes, and the output before and after: see `trying.answer`."""
    if not isinstance(wanted, dict):
        raise RegardError("This is nothing to try.", "Give a source, and changes.")
    return Answer(tried_out(desk.bundle, wanted), [])


def _text(value: Any, name: str) -> str:
    """A text that is one: JSON can hold halves of characters, and other things than text."""
    try:
        if isinstance(value, str) and value.encode() is not None:
            return value
    except UnicodeEncodeError:
        pass
    raise RegardError(f"The {name} is no text.", "Give a string of whole characters.")


REQUESTS: dict[str, Callable[[Desk, Any], Answer]] = {"look": _look, "try": _try}
