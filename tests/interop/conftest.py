"""The library that others open these folders with."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def transformers() -> Any:
    """Opening it takes seconds, so it is opened where a test asks for it."""
    import transformers as library

    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library
