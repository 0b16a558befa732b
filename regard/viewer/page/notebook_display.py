"""What shows itself in a notebook: as a widget or, where none can be had, as a picture."""

from functools import cached_property
from typing import Any

from regard.errors import RegardError


class Showing:
    """Whoever has a scene for a widget and a picture."""

    def widget(self) -> Any:
        """The page as a widget, for notebooks: needs `regard[notebook]`. Other inputs can be tried in it."""
        return self._widget

    @cached_property
    def _widget(self) -> Any:
        return self._make_widget()

    def _make_widget(self) -> Any:
        raise NotImplementedError

    def _picture(self, form: str) -> bytes:
        raise NotImplementedError

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        """The widget in a notebook; without anywidget, or of what no page can show, only the picture."""
        try:
            return self.widget()._repr_mimebundle_()
        except RegardError:
            return None

    def _repr_png_(self) -> bytes:
        return self._picture("png")
