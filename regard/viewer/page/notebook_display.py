"""Display in notebooks: a widget or, without anywidget, a plot."""

from functools import cached_property
from types import SimpleNamespace
from typing import Any

from regard.errors import RegardError


class NotebookDisplay:
    """Base class of objects that a notebook displays as a widget or as a plot."""

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: all arrays, but neither the model (of an image model only the config) nor the widget."""
        state = {name: value for name, value in vars(self).items() if name != "_widget"}
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
            return self.widget()._repr_mimebundle_()
        except RegardError:
            return None

    def _repr_png_(self) -> bytes:
        return self._plot("png")
