"""The decoding engine: static caches, continuous batching and several workers, equal to the plain search."""

from regard.decode.engine.engine_runner import decode_sentences, plain_search_reason

__all__ = ["decode_sentences", "plain_search_reason"]
