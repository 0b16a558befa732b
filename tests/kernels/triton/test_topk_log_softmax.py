"""Top-k log-probabilities under constraints against torch: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from regard.kernels.triton import topk_log_softmax as kernels
from regard.kernels.triton.support import is_interpreted, triton_available
from regard.kernels.triton.topk_log_softmax import reference_topk_log_softmax, topk_log_softmax
from tests.attention.helpers import FakeCudaTensor
from tests.kernels.triton.helpers import combine

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")

DEVICE = "cpu" if is_interpreted() else "cuda"
BANNED = (0, 1)
EOS = 2


def expected_results(logits, k, banned=BANNED, forced=None, ban_eos=None):
    """Row by row in float64; equal logits in the order of their ids."""
    values, ids = [], []
    for r, row in enumerate(logits.double().cpu()):
        log_p = row.log_softmax(0) if row.max() > -torch.inf else row
        if forced is not None and forced[r] >= 0:
            log_p[torch.arange(len(row)) != forced[r].item()] = -torch.inf
        else:
            log_p[list(banned)] = -torch.inf
            if ban_eos is not None and ban_eos[r]:
                log_p[EOS] = -torch.inf
        row_values, row_ids = log_p.sort(descending=True, stable=True)
        values.append(row_values[:k])
        ids.append(row_ids[:k])
    return torch.stack(values), torch.stack(ids)


def assert_results(actual, expected, logits):
    log_p, ids = (x.cpu() for x in actual)
    assert (log_p.dtype, ids.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(log_p.double(), expected[0], rtol=1e-5, atol=1e-5)
    is_finite = expected[0] > -torch.inf
    assert torch.equal(ids[is_finite], expected[1][is_finite])
    assert ((ids >= 0) & (ids < logits.shape[1])).all()


SIZES = [(1, 16, 16), (3, 37, 1), (4, 500, 8), (2, 731, 10), (5, 213, 2)]


@pytest.mark.parametrize(
    ("sizes", "dtype", "splits"), combine(5, SIZES, [torch.float32, torch.float16, torch.bfloat16], [1, 2, 8]), ids=str
)
def test_kernel_equals_torch(sizes, dtype, splits, monkeypatch):
    rows, columns, k = sizes
    monkeypatch.setattr(kernels, "BLOCK", 64)
    monkeypatch.setattr(kernels, "_splits", lambda rows, columns: splits)
    torch.manual_seed(0)
    logits = (5 * torch.randn(rows, columns)).to(DEVICE, dtype)
    logits[:, :3] += 20  # banned tokens would be first
    forced = torch.tensor([-1, 5, 0, 12, -1], dtype=torch.int32, device=DEVICE)[:rows]
    ban_eos = torch.tensor([True, False, True, True, False], device=DEVICE)[:rows]
    for options in ({}, {"ban_eos": ban_eos}, {"forced": forced, "ban_eos": ban_eos.byte()}):
        expected = expected_results(logits, k, **options)
        assert_results(topk_log_softmax(logits, k, banned=BANNED, eos=EOS, **options), expected, logits)
        plain, _ = reference_topk_log_softmax(logits, k, banned=BANNED, eos=EOS, **options)
        torch.testing.assert_close(plain.double().cpu(), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
def test_equal_logits_are_ordered_by_id(splits, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(kernels, "_splits", lambda rows, columns: splits)
    torch.manual_seed(0)
    logits = torch.randint(4, (6, 203)).float().to(DEVICE)
    assert_results(topk_log_softmax(logits, 8, banned=(), eos=EOS), expected_results(logits, 8, banned=()), logits)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("k", [1, 4])
def test_nan_and_infinite_logits(k, splits, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(kernels, "_splits", lambda rows, columns: splits)
    torch.manual_seed(0)
    logits = torch.randn(6, 90, device=DEVICE)
    logits[0, 70] = torch.nan
    logits[1, 0] = -torch.nan  # banned, but still part of the sum
    logits[2] = -torch.inf
    logits[3, 3:] = -torch.inf
    logits[4, 4] = torch.inf
    log_p, ids = (x.cpu() for x in topk_log_softmax(logits, k, banned=BANNED, eos=EOS))
    assert log_p[:2].isnan().all()
    assert ids[0, 0] == 70
    assert (log_p[2] == -torch.inf).all()
    assert ids[3, 0] == EOS
    assert log_p[3].isfinite().tolist() == [True] + [False] * (k - 1)
    assert log_p[4, 0].isnan()
    assert log_p[5].isfinite().all()
    forced = torch.full((6,), 7, dtype=torch.int32, device=DEVICE)
    log_p = topk_log_softmax(logits, k, banned=BANNED, eos=EOS, forced=forced)[0].cpu()
    assert log_p[:2, 0].isnan().all()
    assert (log_p[2:4, 0] == -torch.inf).all()
    assert (log_p[:, 1:] == -torch.inf).all()


def test_splits_depend_on_shapes():
    assert kernels._splits(1, 32000) == 32
    assert kernels._splits(64, 32000) == 8
    assert kernels._splits(2048, 32000) == 1
    assert kernels._splits(1, 100) == 1


def test_supported_inputs():
    logits = torch.zeros(2, 30).as_subclass(FakeCudaTensor)
    assert kernels.supports(logits, 16)
    assert not kernels.supports(logits, 17)
    assert not kernels.supports(logits[:, :8], 16)
    assert not kernels.supports(logits.double(), 1)
    assert not kernels.supports(logits.as_subclass(torch.Tensor), 1)
