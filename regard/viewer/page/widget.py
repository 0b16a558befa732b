"""The page as a widget of a notebook, by anywidget, which is asked for when somebody looks and not before."""

import logging
from functools import cache
from typing import Any

from regard.errors import RegardError
from regard.interop.optional_packages import need
from regard.viewer.page.text_requests import Desk
from regard.viewer.page.text_scene import Scene, scene_of
from regard.viewer.text_look import Look
from regard.viewer.web import module

_LOG = logging.getLogger("regard")


def widget_of(look: Look) -> Any:
    """A widget with the scene of a look. Its page can ask for other sentences, where the look knows its model.

    Its traits: `scene` (the header), `blobs` (bytes), `asks` (the texts that the model takes).
    """
    layers = list(dict.fromkeys(one.recorded.name for one in look.maps.values()))
    return widget_with(scene_of(look), None if look.bundle is None else Desk(look.bundle, look.name, layers))


def widget_with(scene: Scene, desk: Desk | None) -> Any:
    """A widget with a scene, and with somebody who answers its page."""
    return _kind()(desk, scene=scene.header, blobs=scene.blobs, asks=desk.fields if desk else [])


@cache
def _kind() -> Any:
    """The class, which has a parent only where anywidget is installed."""
    anywidget, traitlets = need("anywidget", "notebook"), need("traitlets", "notebook")

    class LookWidget(anywidget.AnyWidget):
        _esm = module()
        scene = traitlets.Dict().tag(sync=True)
        blobs = traitlets.List(traitlets.Bytes()).tag(sync=True)
        asks = traitlets.List(traitlets.Unicode()).tag(sync=True)

        def __init__(self, desk: Desk | None, **traits: Any) -> None:
            super().__init__(**traits)
            self.desk = desk
            self.on_msg(self._hear)

        def _hear(self, _: Any, message: Any, buffers: Any) -> None:
            """Answers a page's request, under the number that it came with."""
            match message:
                case {"number": number, "ask": request} if self.desk is not None:
                    self.send({"heard": number})  # so that the page knows a kernel that is at work from one that is not
                    try:
                        told, blobs = self.desk.answer(request)
                        self.send({"answers": number, "told": told}, blobs)
                    except RegardError as error:
                        self.send({"answers": number, "error": str(error)})
                    except Exception:
                        _LOG.exception("The page asked for what failed.")
                        self.send(
                            {"answers": number, "error": "Something went wrong inside Regard. The log says what."}
                        )

    return LookWidget
