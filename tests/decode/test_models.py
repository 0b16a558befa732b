"""Decoding of real models: cached steps match the forward pass over the full sequence."""

import pytest
import torch
from torch import nn

from regard.attention.recording import record
from regard.decode import SPECIAL, DecodeConfig, Ensemble, Request, decode_all
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.models.seq2seq import Seq2Seq, Seq2SeqConfig
from regard.models.transformer import Transformer, TransformerConfig
from tests.decode.helpers import HistoryModel, beam

SENTENCES = [[4 + (3 * i + j) % 8 for j in range(1 + i % 5)] + [SPECIAL.eos] for i in range(9)]


VOCAB = {"source_vocab": 13, "target_vocab": 13, "tied": False}
FAMILIES = {
    "transformer": lambda: Transformer(
        TransformerConfig(width=16, heads=2, feedforward=32, encoder_layers=1, decoder_layers=2, **VOCAB)
    ),
    "luong": lambda: Seq2Seq(Seq2SeqConfig(width=16, attention="luong", **VOCAB)),
    "bahdanau": lambda: Seq2Seq(Seq2SeqConfig(width=16, attention="bahdanau", cell="lstm", layers=2, **VOCAB)),
    "none": lambda: Seq2Seq(Seq2SeqConfig(width=16, attention="none", **VOCAB)),
}


def small_model(family: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        model.output.weight.mul_(4 if family == "transformer" else 20)  # peaked distributions, to avoid near ties
    return model


@torch.no_grad()
def teacher_forced(model: nn.Module, source: list[int], ids: list[int]) -> torch.Tensor:
    log_p = model(pack([source]), pack([[SPECIAL.sos, *ids]])).log_softmax(-1)
    return log_p.gather(1, torch.tensor([*ids, SPECIAL.eos])[:, None]).squeeze(1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("config", [DecodeConfig("greedy"), DecodeConfig(beam=4, n_best=4)], ids=["greedy", "beam"])
def test_log_probabilities_match_teacher_forcing(config: DecodeConfig, family: str) -> None:
    model = small_model(family, 0)
    lengths = set()
    for source, result in zip(SENTENCES, decode_all(model, Request(SENTENCES, config))):
        for h in result:
            lengths.add(len(h.ids))
            torch.testing.assert_close(
                torch.tensor(h.token_logprobs), teacher_forced(model, source, h.ids), atol=1e-4, rtol=1e-4
            )
    assert len(lengths) > 2, "outputs of one length would not test removing finished sentences"


def test_ensemble_of_two_families() -> None:
    first, second = small_model("transformer", 0), small_model("luong", 1)
    for source, result in zip(SENTENCES, beam(Ensemble([first, second]), SENTENCES, DecodeConfig(beam=3))):
        ids = result[0].ids
        mean = (teacher_forced(first, source, ids).exp() + teacher_forced(second, source, ids).exp()) / 2
        torch.testing.assert_close(torch.tensor(result[0].token_logprobs), mean.log(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["transformer", "luong", "bahdanau"])
def test_coverage_matches_teacher_forcing(family: str) -> None:
    """Scores with a coverage penalty, compared with the attention of a teacher-forced forward pass."""
    model = small_model(family, 0)
    config = DecodeConfig(beam=4, n_best=4, length_penalty=0.5, coverage_penalty=2.0, max_ratio=0.6, max_extra=0)
    terms = []
    for source, result in zip(SENTENCES, beam(model, SENTENCES, config)):
        for h in result:
            with record(model) as recording:
                model(pack([source]), pack([[SPECIAL.sos, *h.ids]]))
            # Bahdanau attention is called once per step; weights() concatenates the calls along the queries.
            cross = [one.weights().mean(1) for one in recording.values() if one.kind == "cross"]
            coverage = torch.stack(cross).mean(0)[0].sum(0)
            terms.append(coverage.clamp(max=1).log().sum().item())
            assert h.score == pytest.approx(h.logprob / (len(h.ids) + 1) ** 0.5 + 2.0 * terms[-1], abs=1e-4)
        assert [h.score for h in result] == sorted((h.score for h in result), reverse=True)
    assert min(terms) < -0.5


@pytest.mark.parametrize("model", [small_model("none", 0), HistoryModel(13)], ids=["no attention", "no module"])
def test_coverage_without_cross_attention_raises(model) -> None:
    with pytest.raises(RegardError, match="attention"):
        beam(model, SENTENCES, DecodeConfig(coverage_penalty=0.2))
