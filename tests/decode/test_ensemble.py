"""Ensembles of models."""

import pytest
import torch
from torch import nn

from regard.decode import DecodeConfig, Ensemble
from regard.errors import RegardError
from tests.decode.helpers import HistoryModel, TableModel, beam, greedy

SENTENCES = [[5, 1, 1], [9], [4, 1], [8, 1, 1, 1]]


def test_ensemble_of_copies_equals_the_model() -> None:
    model = HistoryModel(12, seed=1)
    config = DecodeConfig(beam=3, n_best=3)
    alone = beam(model, SENTENCES, config)
    together = beam(Ensemble([model] * 3), SENTENCES, config)
    for one, other in zip(alone, together):
        assert [h.ids for h in one] == [h.ids for h in other]
        assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-5)


def test_two_models_with_known_probabilities() -> None:
    """After <sos>, 4 or 5 with probabilities 0.9 and 0.1 in one model, 0.2 and 0.8 in the other; then <eos>."""

    def chain(four: float) -> TableModel:
        p = torch.zeros((6, 6))
        p[2, 4], p[2, 5] = four, 1 - four
        p[4, 3] = p[5, 3] = 1.0
        return TableModel(p.log())

    models = [chain(0.9), chain(0.2)]
    result = beam(Ensemble(models), [[4]], DecodeConfig(beam=2, n_best=2))[0]
    assert [h.ids for h in result] == [[4], [5]]
    assert [torch.tensor(h.logprob).exp().item() for h in result] == pytest.approx([0.55, 0.45])


def test_member_without_possible_tokens_is_ignored() -> None:
    no_tokens = TableModel(torch.full((6, 6), -torch.inf))
    p = torch.zeros((6, 6))
    p[2, 4] = p[4, 3] = 1.0
    result = greedy(Ensemble([no_tokens, TableModel(p.log())]), [[4]])[0]
    assert result[0].ids == [4]
    assert greedy(Ensemble([no_tokens, no_tokens]), [[4]])[0][0].ids == []


def test_members_are_submodules() -> None:
    class Small(nn.Module, HistoryModel):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

    ensemble = Ensemble([Small(), Small()])
    assert len(list(ensemble.parameters())) == 2
    ensemble.eval()
    assert not ensemble.models[1].training


def test_invalid_ensembles_raise() -> None:
    with pytest.raises(RegardError, match="different sizes: 12, 13"):
        greedy(Ensemble([HistoryModel(12), HistoryModel(13)]), SENTENCES)
    with pytest.raises(RegardError, match="at least one model"):
        Ensemble([])
