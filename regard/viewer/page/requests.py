"""Requests that a page sends to a model, in the live page and in a notebook.

A request is JSON with one name and its arguments, `{"look": {"source": "The cat sleeps."}}`. To add a request, write a
function and register it in `REQUESTS`: both hosts and their error handling use that table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, NamedTuple

from torch import Tensor

from regard.errors import RegardError
from regard.models import family_name
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator
from regard.pipelines.image_model import ImageLike
from regard.viewer.experiments import handle_experiment
from regard.viewer.page.explanations import handle_explanation
from regard.viewer.page.image_scene import build_image_scene
from regard.viewer.page.text_scene import Scene, build_scene, make_header
from regard.viewer.text_look import LayerNames, Look, look


class Response(NamedTuple):
    """JSON for the page, and the blobs that it refers to by index. A new scene has the key "scene"."""

    header: dict[str, Any]
    blobs: list[bytes]


@dataclass(frozen=True, eq=False)
class TextRequestHandler:
    """Handles the requests of a page with a text model, one at a time."""

    pipeline: Translator | TextGenerator | TextEncoder
    name: str = ""
    """name of the model in the page"""
    layers: LayerNames = None
    """attentions to record; None: all"""
    truncate: bool = False
    lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def fields(self) -> list[str]:
        """Names of the texts in a request."""
        return list(self.pipeline.fields)

    def look(self, texts: dict[str, str]) -> Scene:
        """The scene of a look at these texts, by field name."""
        target = texts.get("target", "").strip() or None  # an empty field is no target
        context = texts.get("context", "").strip() or None
        options: dict[str, Any] = dict(layers=self.layers, name=self.name, truncate=self.truncate)
        return build_scene(look(self.pipeline, texts["source"], target, context=context, **options))

    def handle(self, request: Any) -> Response:
        """Respond to a request; raises a RegardError if it is invalid."""
        match request:
            case dict() if len(request) == 1 and (name := next(iter(request))) in REQUESTS:
                with self.lock:
                    return REQUESTS[name](self, request[name])
        raise RegardError("Invalid request.", f"Supported requests: {', '.join(REQUESTS)}.")

    def initial_scene(self) -> Scene:
        """The empty scene before the first request."""
        family = family_name(self.pipeline.model.config)
        texts = {"source": "", "target": ""}
        return Scene(make_header(self.name, family, self.name, texts, sides={}, attentions=[]), [])


def _look(handler: TextRequestHandler, arguments: Any) -> Response:
    """Look at a sentence and a translation, by default the model's own."""
    if not isinstance(arguments, dict) or "source" not in arguments or not set(arguments) <= set(handler.fields):
        raise RegardError("Invalid request to look.", f"Expected the texts: {', '.join(handler.fields)}.")
    scene = handler.look({name: _check_text(text, name) for name, text in arguments.items()})
    return Response({"scene": scene.header}, scene.blobs)


def _experiment(handler: TextRequestHandler, arguments: Any) -> Response:
    """Run an experiment: see `handle_experiment`."""
    if not isinstance(arguments, dict):
        raise RegardError("Invalid request for an experiment.", "Send an object with a source and changes.")
    return Response(handle_experiment(handler.pipeline, arguments), [])


def _explain(handler: TextRequestHandler, arguments: Any) -> Response:
    """Compute a measure of an output: see `handle_explanation`."""
    if not isinstance(arguments, dict):
        raise RegardError("Invalid request for an explanation.", "Send the inputs and steps of the scene.")
    return Response(handle_explanation(Look("", "", [], [], {}, pipeline=handler.pipeline), arguments), [])


def _check_text(value: Any, name: str) -> str:
    """Raise an error unless the value is valid Unicode text: JSON may contain other types and unpaired surrogates."""
    try:
        if isinstance(value, str) and value.encode() is not None:
            return value
    except UnicodeEncodeError:
        pass
    raise RegardError(f"The {name} is not valid text.", "Send a string of valid Unicode.")


REQUESTS: dict[str, Callable[[TextRequestHandler, Any], Response]] = {
    "look": _look,
    "experiment": _experiment,
    "explain": _explain,
}


TEXT_FIELDS = ("target", "prefix", "instead", "context")


@dataclass(frozen=True, eq=False)
class ImageRequestHandler(TextRequestHandler):
    """Handles the requests of a page with an image model, one at a time.

    A request is `{"look": {"image": name}}`, or `{"experiment": …}` with the name as its source
    (see `handle_experiment`).
    """

    pipeline: ImageModel  # type: ignore[assignment]
    images: Mapping[str, ImageLike | Tensor] = field(default_factory=dict, kw_only=True)
    """images by name; a page cannot open other files"""

    @property
    def fields(self) -> list[str]:
        return ["image"]

    def handle(self, request: Any) -> Response:
        match request:
            case {"look": {"image": name, **others}} if not others and len(request) == 1:
                with self.lock:
                    return self._look(name)
            case {"experiment": dict() as arguments} if len(request) == 1:
                with self.lock:
                    return self._experiment(arguments)
            case {"explain": dict() as arguments} if len(request) == 1:
                with self.lock:
                    result = look(self.pipeline, self._image(arguments.get("source")))
                    return Response(handle_explanation(result, arguments), [])
        raise RegardError("Invalid request for a page of images.", "Supported requests: look, experiment, explain.")

    def _look(self, name: Any) -> Response:
        result = replace(look(self.pipeline, self._image(name), name=self.name), name=name)
        scene = build_image_scene(result, images=list(self.images))
        return Response({"scene": scene.header}, scene.blobs)

    def _experiment(self, arguments: Mapping[str, Any]) -> Response:
        if any(arguments.get(name) is not None for name in TEXT_FIELDS):
            raise RegardError("An experiment on an image takes no texts.", f"Leave out {', '.join(TEXT_FIELDS)}.")
        image = self._image(arguments.get("source"))
        return Response(handle_experiment(self.pipeline, arguments, image), [])

    def _image(self, name: Any) -> ImageLike | Tensor:
        if not isinstance(name, str) or name not in self.images:
            raise RegardError("Unknown image.", f"Choose one of: {', '.join(self.images)}.")
        return self.images[name]
