"""Fixture of the transformers library."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The library, imported on first use because the import takes seconds."""
    import transformers as library

    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library
