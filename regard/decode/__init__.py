"""Decoding: greedy search, beam search and sampling, for any model that implements the `Decodable` protocol."""

from regard.decode.batched_decoding import decode_all
from regard.decode.beam_search import beam
from regard.decode.decode_config import DecodeConfig
from regard.decode.engine_choice import EngineChoice, explain
from regard.decode.ensemble import Ensemble
from regard.decode.hypotheses import Hypothesis, NBest, RefusedToken, SearchHistory, SearchStep
from regard.decode.protocol import SPECIAL, Decodable, SourceBatch, SpecialTokens
from regard.decode.request import Request
from regard.decode.rules.lexical_constraints import LexicalConstraints
from regard.decode.rules.token_texts import TokenTexts
from regard.decode.sampling import greedy, sample
from regard.decode.shortlist import Shortlist

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
    "beam",
    "decode_all",
    "explain",
    "greedy",
    "sample",
]
