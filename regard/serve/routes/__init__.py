"""Routes of the server: native, OpenAI, LibreTranslate, status, and the page to try models."""
