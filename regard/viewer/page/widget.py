"""The page as a notebook widget (anywidget, imported on first use)."""

import logging
from functools import cache
from typing import Any

from regard.errors import RegardError, require_package
from regard.viewer.page.text_requests import TextRequestHandler
from regard.viewer.page.text_scene import Scene, build_scene
from regard.viewer.text_look import Look
from regard.viewer.web import module

_LOG = logging.getLogger("regard")


def make_look_widget(look: Look) -> Any:
    """A widget with the scene of a look. If the look has its model, the page can send other sentences.

    Traits: `scene` (the header), `blobs` (bytes), `fields` (names of the texts in a request).
    """
    layers = list(dict.fromkeys(one.recorded.name for one in look.maps.values()))
    return make_widget(
        build_scene(look), None if look.pipeline is None else TextRequestHandler(look.pipeline, look.name, layers)
    )


def make_widget(scene: Scene, handler: TextRequestHandler | None) -> Any:
    """A widget with a scene, and optionally a handler for the requests of its page."""
    return _widget_class()(handler, scene=scene.header, blobs=scene.blobs, fields=handler.fields if handler else [])


@cache
def _widget_class() -> Any:
    """The widget class, defined on first use because its base class needs anywidget."""
    anywidget, traitlets = require_package("anywidget", "notebook"), require_package("traitlets", "notebook")

    class LookWidget(anywidget.AnyWidget):
        _esm = module()
        scene = traitlets.Dict().tag(sync=True)
        blobs = traitlets.List(traitlets.Bytes()).tag(sync=True)
        fields = traitlets.List(traitlets.Unicode()).tag(sync=True)

        def __init__(self, handler: TextRequestHandler | None, **traits: Any) -> None:
            super().__init__(**traits)
            self.handler = handler
            self.on_msg(self._on_message)

        def _on_message(self, _: Any, message: Any, buffers: Any) -> None:
            """Respond to a request of the page; the response has the number of the request."""
            match message:
                case {"number": number, "request": request} if self.handler is not None:
                    self.send({"received": number})  # lets the page distinguish a busy kernel from a dead one
                    try:
                        header, blobs = self.handler.handle(request)
                        self.send({"response_to": number, "response": header}, blobs)
                    except RegardError as error:
                        self.send({"response_to": number, "error": str(error)})
                    except Exception:
                        _LOG.exception("A request of the page failed.")
                        self.send(
                            {"response_to": number, "error": "Internal error in Regard. See the log for details."}
                        )

    return LookWidget
