"""Display in notebooks: a widget or, without anywidget or its kernel, a plot."""

import base64
import html
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from regard.errors import RegardError

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


class NotebookDisplay:
    """Base class of objects that a notebook displays as a widget or as a plot."""

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: all arrays, but neither the model (of an image model only the config) nor displays."""
        state = {name: value for name, value in vars(self).items() if name not in ("_widget", "_picture")}
        state |= {"pipeline": None} if "pipeline" in state else {}
        if "run" in state:
            state["run"] = state["run"]._replace(model=SimpleNamespace(config=state["run"].model.config))
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
