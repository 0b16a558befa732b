"""Requests that a page of images sends to a model: look at another of its images, run an experiment."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from regard.errors import RegardError
from regard.pipelines import ImageModel
from regard.pipelines.image_model import ImageLike
from regard.viewer.experiments import handle_experiment
from regard.viewer.page.image_scene import build_image_scene
from regard.viewer.page.page_explanations import handle_explanation
from regard.viewer.page.text_requests import Response, TextRequestHandler
from regard.viewer.text_look import look

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
                    seen = look(self.pipeline, self._image(arguments.get("source")))
                    return Response(handle_explanation(seen, arguments), [])
        raise RegardError("Invalid request for a page of images.", "Supported requests: look, experiment, explain.")

    def _look(self, name: Any) -> Response:
        seen = replace(look(self.pipeline, self._image(name), name=self.name), name=name)
        scene = build_image_scene(seen, images=list(self.images))
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
