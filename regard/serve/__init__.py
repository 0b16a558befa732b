"""A server for models: dynamic batching, the APIs of OpenAI and LibreTranslate, and a Python client."""
