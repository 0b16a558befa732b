"""Bookkeeping of beam search and greedy decoding against the engine's: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from regard.decode.protocol import SpecialTokens
from regard.decode.request import DecodeConfig
from regard.decode.rules import Constraints
from regard.decode.search import BeamSearch, StepwiseSearch
from regard.kernels.triton import search_update
from regard.kernels.triton.search_update import beam_update, greedy_update
from regard.kernels.triton.support import is_interpreted, triton_available
from tests.attention.helpers import FakeCudaTensor

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")
EOS = SpecialTokens().eos
SLOTS, CAPACITY = 5, 7


def make_states(state_class, config, ends_at_limit=False):
    """Two equal states of which the last slot is empty; outputs have at most 3 to 6 tokens."""
    states = []
    for _ in range(2):
        constraints = Constraints(SLOTS, 0, config, SpecialTokens(), DEVICE, ends_at_limit)
        constraints.set_slots(range(SLOTS), [3, 4, 5, 6, 6], [[]] * SLOTS)
        state = state_class(SLOTS, CAPACITY, config, constraints, DEVICE)
        used = torch.arange(SLOTS - 1, device=DEVICE)
        state.start(used, torch.full_like(used, 2), torch.zeros_like(used))
        states.append(state)
    return states


def assert_states_equal(actual, expected, step):
    for name in expected.tensors():
        x, y = getattr(actual, name), getattr(expected, name)
        if name == "ancestors":  # later ones are not used yet
            x, y = x[..., : step + 2], y[..., : step + 2]
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6, msg=lambda message, name=name: f"{name}: {message}")


@pytest.mark.parametrize(
    ("K", "C", "n_best", "length_penalty", "patience", "early_stopping", "ends_at_limit"),
    [
        (1, 2, 1, 1.0, 1.0, True, False),
        (4, 8, 4, 1.0, 2.0, True, False),
        (5, 10, 1, 0.0, 1.0, True, True),
        (5, 3, 5, 1.3, 1.0, True, False),
        (3, 6, 1, 0.8, 1.0, False, False),
        (3, 6, 2, 0.8, 1.0, False, True),
    ],
)
def test_beam_update_equals_engine(K, C, n_best, length_penalty, patience, early_stopping, ends_at_limit):
    config = DecodeConfig(
        beam=K, n_best=n_best, length_penalty=length_penalty, patience=patience, early_stopping=early_stopping
    )
    state, expected = make_states(BeamSearch, config, ends_at_limit)
    torch.manual_seed(0)
    finished = 0
    for step in range(CAPACITY):
        top = (torch.randn(SLOTS, K, C, device=DEVICE) - 2).sort(dim=-1, descending=True)[0]
        ids = torch.rand(SLOTS, K, 11, device=DEVICE).argsort(-1)[..., :C].contiguous()
        ids[0, :, 0] = EOS if step else 5
        is_at_limit = step >= state.constraints.limit
        top[is_at_limit, :, 1:] = -torch.inf
        ids[is_at_limit, :, 0] = EOS
        positions = torch.full((SLOTS,), step, device=DEVICE)
        options = {"eos": EOS, "length_penalty": length_penalty, "enough": config.enough}
        options["early_stopping"] = early_stopping
        tensors = {name: getattr(state, name) for name in state.tensors()}
        parents = beam_update(top, ids, positions, state.constraints.last_step, **tensors, **options)
        expected_parents = expected.keep_best(top, ids, positions)
        # The order of hypotheses without a chance, with -inf, does not matter.
        is_used = expected.log_prob > -torch.inf
        assert torch.equal(parents[is_used], expected_parents[is_used])
        for name in ("ancestors", "last"):
            getattr(state, name)[~is_used] = getattr(expected, name)[~is_used]
        for name in ("tokens", "parents", "token_log_p"):
            getattr(state, name).mT[~is_used] = getattr(expected, name).mT[~is_used]
        has_finished = expected.finished_score > -torch.inf
        for name in ("finished_log_prob", "finished_step", "finished_parent", "end_token", "end_log_p"):
            getattr(state, name)[~has_finished] = getattr(expected, name)[~has_finished]
        assert_states_equal(state, expected, step)
        finished = int(expected.finished_count.sum())
    assert finished >= SLOTS - 1
    assert expected.done.all()


@pytest.mark.parametrize("K", [1, 3])
def test_greedy_update_equals_engine(K):
    config = DecodeConfig(method="sample" if K > 1 else "greedy", n_best=K)
    state, expected = make_states(StepwiseSearch, config)
    torch.manual_seed(0)
    names = ("step", "done", "live", "last", "tokens", "token_log_p", "lengths")
    for step in range(CAPACITY):
        token = torch.randint(8, (SLOTS, K), device=DEVICE)
        log_p = torch.randn(SLOTS, K, device=DEVICE)
        if step == 2:
            log_p[1] = -torch.inf
        greedy_update(token, log_p, **{name: getattr(state, name) for name in names}, eos=EOS)
        expected.append(token, log_p)
        assert_states_equal(state, expected, step)
    assert expected.done.any()


def test_supported_inputs():
    x = torch.zeros(2, 4).as_subclass(FakeCudaTensor)
    assert search_update.supports(x, 4, 8)
    assert not search_update.supports(x.as_subclass(torch.Tensor), 4, 8)
    assert not search_update.supports(x, 33, 2)
    assert not search_update.supports(x, 32, 64)
