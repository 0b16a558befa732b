"""What looks and comparisons have in common: output formats, notebooks, the explanations of an output."""

import base64
import html
import logging
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import RegardError, require_package
from regard.files import check_output_file
from regard.viewer.web import module

if TYPE_CHECKING:
    from regard.viewer.explanations.head_effects import HeadEffects
    from regard.viewer.explanations.logit_lens import LogitLens
    from regard.viewer.page.requests import TextRequestHandler
    from regard.viewer.page.text_scene import Scene


PAGE_FORMAT, PLOT_FORMATS = "html", ("png", "svg", "pdf")
# Published before the widget. Where its kernel is gone, JupyterLab shows an error instead of the widget, in an element
# without children, and then this picture. Elsewhere, and in notebooks that are not trusted, the picture is hidden.
_PICTURE = """\
<style>
.jp-OutputArea-output > .regard-picture { display: block; max-width: 100%%; background: white; }
.jp-OutputArea-child:has(> * > .regard-picture):has(+ * .regard) { display: none; }
.jp-OutputArea-child:has(> * > .regard-picture) + * > .jp-OutputArea-output:not(:has(*)) { display: none; }
</style>
<img class="regard-picture" hidden alt="%s" src="data:image/png;base64,%s">
"""


def check_format(path: str | Path, image: Path | None = None) -> str:
    """The format of an output file, by its extension; an error for an unsupported one, or the file of the image."""
    file_format = Path(path).suffix.lower().removeprefix(".")
    if file_format not in (PAGE_FORMAT, *PLOT_FORMATS):
        raise RegardError(f"{path}: pages are .html, plots are .png, .svg or .pdf.", "Change the file extension.")
    check_output_file(path, [image])
    return file_format


class NotebookDisplay:
    """Base class of objects that a notebook displays as a widget or as a plot."""

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: all arrays, but neither the model (of an image model only the config) nor displays."""
        state = {name: value for name, value in vars(self).items() if name not in ("_widget", "_picture")}
        state |= {"pipeline": None} if "pipeline" in state else {}
        if "run" in state:
            state["run"] = None if state["run"] is None else state["run"].without_model()
        return state

    def widget(self) -> Any:
        """The page as a notebook widget, which can run the model on other inputs; needs anywidget."""
        return self._widget

    @cached_property
    def _widget(self) -> Any:
        return self._make_widget()

    def _make_widget(self) -> Any:
        raise NotImplementedError

    def _plot(self, file_format: str) -> bytes:
        raise NotImplementedError

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        """The widget; None, so that only the plot is shown, without anywidget or if a page cannot show the model."""
        try:
            bundle = self.widget()._repr_mimebundle_()
        except RegardError:
            return None
        self._publish_picture()
        return bundle

    def _repr_png_(self) -> bytes:
        return self._picture

    @cached_property
    def _picture(self) -> bytes:
        return self._plot("png")

    def _publish_picture(self) -> None:
        """In a notebook, publish the plot as an output of its own, which is shown if the widget cannot be."""
        from IPython import get_ipython  # installed with anywidget

        shell: Any = get_ipython()  # type: ignore[no-untyped-call]
        if shell is not None:
            picture = html.escape(repr(self)), base64.b64encode(self._picture).decode()
            shell.display_pub.publish({"text/html": _PICTURE % picture})


class ExplainedLook:
    """Base class of looks, whose output can be explained."""

    def head_effects(self: Any) -> "HeadEffects":
        """The change of the output's log-probability if a head is ablated, for every head (see `HeadEffects`).

        >>> look(translator, "The cat sleeps.").head_effects().largest  # doctest: +SKIP
        ('decoder.1.cross', 2)
        """
        from regard.viewer.explanations.head_effects import compute_head_effects

        return compute_head_effects(self)

    def logit_lens(self: Any) -> "LogitLens":
        """What the model would predict after each layer (see `LogitLens`).

        >>> look(translator, "The cat sleeps.").logit_lens().candidates(1, 0)  # doctest: +SKIP
        {'le': 0.93, 'la': 0.04, 'un': 0.01, 'une': 0.01, 'les': 0.0}
        """
        from regard.viewer.explanations.logit_lens import compute_logit_lens

        return compute_logit_lens(self)


_LOG = logging.getLogger("regard")


def make_widget(scene: "Scene", handler: "TextRequestHandler | None") -> Any:
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

        def __init__(self, handler: "TextRequestHandler | None", **traits: Any) -> None:
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
