"""Decoding: greedy search, beam search and sampling, for any model that implements the `Decodable` protocol."""

from regard.decode.batching import decode_all, decode_batch
from regard.decode.beams import beam
from regard.decode.config import DecodeConfig
from regard.decode.ensemble import Ensemble
from regard.decode.hypotheses import BeamHistory, BeamStep, Hypothesis, NBest, RefusedToken
from regard.decode.protocol import SPECIAL, Decodable, SourceBatch, Special
from regard.decode.stepwise import greedy, sample

__all__ = [
    "SPECIAL",
    "BeamHistory",
    "BeamStep",
    "Decodable",
    "DecodeConfig",
    "Ensemble",
    "Hypothesis",
    "NBest",
    "RefusedToken",
    "SourceBatch",
    "Special",
    "beam",
    "decode_all",
    "decode_batch",
    "greedy",
    "sample",
]
