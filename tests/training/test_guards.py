"""The guard of the loss: which losses are spikes, and which updates it reports as skipped."""

import math

import numpy as np
import pytest
import torch

from regard.training.checkpoint import TrainState
from regard.training.guards import MAX_SKIPPED, LossGuard, LossStatistics, Position
from regard.training.losses import LossParts


def statistics_of(losses) -> LossStatistics:
    statistics = LossStatistics()
    for loss in losses:
        statistics.add(float(loss))
    return statistics


def first_spike(losses) -> int | None:
    statistics = LossStatistics()
    for index, loss in enumerate(losses):
        if loss >= statistics.limit:
            return index
        statistics.add(float(loss))
    return None


def healthy_runs() -> dict[str, np.ndarray]:
    """Loss curves with the noise of batches, which contain no spike."""
    rng, steps = np.random.default_rng(0), np.arange(5000)
    decay = 2 + 7 * np.exp(-steps / 300)
    return {
        "language model": decay + rng.normal(0, 0.15, 5000),
        "heavy tails": decay + 0.3 * rng.standard_t(3, 5000).clip(-4, 4),
        "overfitted classifier": 0.7 * np.exp(-steps / 200) * rng.gamma(0.3, 3, 5000) * (rng.random(5000) < 0.5),
        "rare hard batches": 0.01 + 0.25 * (rng.random(5000) < 0.002),
        "fine-tuning": 2.3 + rng.normal(0, 0.05, 5000),
        "another corpus": np.where(steps < 2500, 2.0, 3.5) + rng.normal(0, 0.1, 5000),
        "constant": np.full(5000, 1.5),
    }


@pytest.mark.parametrize("name", healthy_runs())
def test_healthy_run_has_no_spike(name):
    losses = healthy_runs()[name]
    losses[:10] = max(losses[0], 0.7)  # the loss at the start
    assert first_spike(losses) is None


def test_spike_of_a_diverging_run_is_found():
    losses = healthy_runs()["language model"]
    losses[3000] = 6.5
    assert first_spike(losses) == 3000


def test_no_loss_is_a_spike_at_first():
    assert statistics_of([5.0] * 99).limit == math.inf
    assert statistics_of([5.0] * 100).limit == 10.0


def test_statistics_survive_a_checkpoint():
    statistics = statistics_of(np.random.default_rng(0).random(300))
    assert LossStatistics.from_list(statistics.to_list()) == statistics
    assert LossStatistics.from_list([]) == LossStatistics()


def parts(loss: float, tokens: float = 2.0) -> LossParts:
    return LossParts(torch.tensor(loss), torch.tensor(loss), torch.tensor(tokens))


def test_inspection_separates_applied_and_skipped_updates():
    guard = LossGuard(torch.device("cpu"), skips_spikes=True)
    guard.reset(statistics_of([2.0] * 100))
    for step, loss in enumerate([4.0, math.nan, 9.0, 4.0, 0.0], 1):
        guard.add(step, Position(0, step - 1), parts(loss))
    applied, skipped = guard.inspect()
    assert [float(part.loss) for part in applied] == [4.0, 4.0, 0.0]
    assert [(update.step, update.start.batch) for update in skipped] == [(2, 1), (3, 2)]
    assert skipped[1].describe(4.0) == "Step 3: the loss is 4.5, which is a spike (from 4 on)"
    assert not guard.has_failed
    assert guard.inspect() == ([], [])


def test_skipped_updates_in_a_row_fail_across_inspections():
    guard = LossGuard(torch.device("cpu"), skips_spikes=True)
    for step in range(MAX_SKIPPED):
        assert not guard.has_failed
        guard.add(step, Position(0, step), parts(math.inf))
        guard.inspect()
    assert guard.has_failed


def test_failure_between_two_inspections_is_noticed():
    """On a GPU, updates after the failure may have been applied before the host reads the losses."""
    guard = LossGuard(torch.device("cpu"), skips_spikes=True)
    for step in range(MAX_SKIPPED + 5):
        guard.add(step, Position(0, step), parts(math.nan if step < MAX_SKIPPED else 1.0))
    assert guard.inspect()[0] == []
    assert guard.has_failed


def test_result_does_not_depend_on_the_number_of_inspections():
    """Rank 0 reads the losses before it saves; the other ranks do not."""
    results = []
    for reads in (range(12), (3, 11), (11,)):
        guard = LossGuard(torch.device("cpu"), skips_spikes=True)
        applied, skipped = [], []
        for step in range(12):
            guard.add(step, Position(0, step), parts(math.nan if step in (1, 4, 5, 6) else float(step)))
            if step in reads:
                new_applied, new_skipped = guard.inspect()
                applied += [float(part.loss) for part in new_applied]
                skipped += [update.step for update in new_skipped]
        results.append((applied, skipped, guard.has_failed))
    assert results == [([0.0, 2.0, 3.0], [1, 4, 5, 6], True)] * 3


def test_batch_without_targets_is_applied():
    guard = LossGuard(torch.device("cpu"), skips_spikes=True)
    assert guard.accepts(parts(0.0, 0.0))
    guard.reset(statistics_of([2.0] * 100))
    assert guard.accepts(parts(0.0, 0.0))


def test_non_finite_validation_selects_no_model():
    assert not TrainState().improves(math.nan, math.nan)
    assert TrainState().improves(-1.0, 1.0)
