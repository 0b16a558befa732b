"""From a model's probabilities to its outputs: greedy, beam search, sampling; one protocol for every model."""

from regard.decode.batched_decoding import decode_all, decode_batch
from regard.decode.beam_search import beam
from regard.decode.decode_config import DecodeConfig
from regard.decode.ensemble import Ensemble
from regard.decode.hypotheses import BeamHistory, BeamStep, Hypothesis, NBest, Refused
from regard.decode.protocol import SPECIAL, Decodable, Source, Special
from regard.decode.sampling import greedy, sample

__all__ = [
    "SPECIAL",
    "BeamHistory",
    "BeamStep",
    "Decodable",
    "DecodeConfig",
    "Ensemble",
    "Hypothesis",
    "NBest",
    "Refused",
    "Source",
    "Special",
    "beam",
    "decode_all",
    "decode_batch",
    "greedy",
    "sample",
]
