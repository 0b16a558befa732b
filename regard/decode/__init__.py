"""Decoding: greedy search, beam search and sampling, for any model that implements the `Decodable` protocol."""

from regard.decode.engine import EngineChoice, decode_all, explain
from regard.decode.ensemble import Ensemble
from regard.decode.history import RefusedToken, SearchHistory, SearchStep
from regard.decode.phrases import LexicalConstraints
from regard.decode.protocol import SPECIAL, Decodable, SourceBatch, SpecialTokens
from regard.decode.request import DecodeConfig, Hypothesis, NBest, Request
from regard.decode.shortlist import Shortlist
from regard.decode.token_texts import TokenTexts

__all__ = [
    "SPECIAL",
    "Decodable",
    "DecodeConfig",
    "EngineChoice",
    "Ensemble",
    "Hypothesis",
    "LexicalConstraints",
    "NBest",
    "RefusedToken",
    "Request",
    "SearchHistory",
    "SearchStep",
    "Shortlist",
    "SourceBatch",
    "SpecialTokens",
    "TokenTexts",
    "decode_all",
    "explain",
]
