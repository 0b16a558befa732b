"""What a page of pictures may ask of a model: another of the pictures that it was given, and changes to be tried."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from regard.errors import RegardError
from regard.pipelines import ImageModel
from regard.pipelines.image_model import Picture
from regard.viewer.experiments import answer as tried_out
from regard.viewer.page.image_scene import scene_of_picture
from regard.viewer.page.text_requests import Answer, Desk
from regard.viewer.text_look import look

NO_TEXTS = ("target", "prefix", "instead")


@dataclass(frozen=True, eq=False)
class PictureDesk(Desk):
    """A model of images that answers a page's requests, one at a time.

    A request is `{"look": {"picture": name}}`, or `{"try": …}` with the name as its source (see `trying.answer`).
    """

    bundle: ImageModel  # type: ignore[assignment]
    pictures: Mapping[str, Picture | Tensor] = field(default_factory=dict, kw_only=True)
    """by the names under which a page asks for them: it opens no other files"""

    @property
    def fields(self) -> list[str]:
        return ["picture"]

    def answer(self, request: Any) -> Answer:
        match request:
            case {"look": {"picture": name, **others}} if not others and len(request) == 1:
                with self.lock:
                    return self._look(name)
            case {"try": dict() as wanted} if len(request) == 1:
                with self.lock:
                    return self._try(wanted)
        raise RegardError("This is nothing that a page of pictures can ask.", "It can ask for: look, try.")

    def _look(self, name: Any) -> Answer:
        seen = replace(look(self.bundle, self._picture(name), name=self.name), name=name)
        scene = scene_of_picture(seen, pictures=list(self.pictures))
        return Answer({"scene": scene.header}, scene.blobs)

    def _try(self, wanted: Mapping[str, Any]) -> Answer:
        if any(wanted.get(name) is not None for name in NO_TEXTS):
            raise RegardError("A picture has no other text.", f"Leave out {', '.join(NO_TEXTS)}.")
        picture = self._picture(wanted.get("source"))
        return Answer(tried_out(self.bundle, wanted, picture), [])

    def _picture(self, name: Any) -> Picture | Tensor:
        if not isinstance(name, str) or name not in self.pictures:
            raise RegardError("This is none of the pictures.", f"There are: {', '.join(self.pictures)}.")
        return self.pictures[name]
