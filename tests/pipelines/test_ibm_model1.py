"""IBM Model 1 against a direct implementation, in chunks of any size."""

from collections import defaultdict

import numpy as np
import pytest

from regard.pipelines import shortlist
from regard.pipelines.shortlist import learn_translation_table


def make_pairs(count=40, seed=0):
    draw = np.random.default_rng(seed)
    pairs = [
        (draw.integers(0, 12, draw.integers(0, 7)), draw.integers(0, 15, draw.integers(0, 6))) for _ in range(count)
    ]
    return [(source.tolist(), target.tolist()) for source, target in pairs]


def direct(pairs, iterations):
    p = defaultdict(lambda: 1.0)
    for _ in range(iterations):
        counts, totals = defaultdict(float), defaultdict(float)
        for source, target in pairs:
            for t in target:
                z = sum(p[s, t] for s in source)
                for s in source:
                    counts[s, t] += p[s, t] / z
                    totals[s] += p[s, t] / z
        p = {(s, t): count / totals[s] for (s, t), count in counts.items()}
    return p


@pytest.mark.parametrize("chunk", [1, 50, 1 << 22])
def test_probabilities(monkeypatch, chunk):
    monkeypatch.setattr(shortlist, "CHUNK_LINKS", chunk)
    pairs, progress = make_pairs(), []
    table = learn_translation_table(pairs, 15, iterations=3, progress=lambda *now: progress.append(now))
    expected = direct(pairs, 3)
    found = {(int(s), int(t)): p for s, t, p in zip(*table)}
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key]) for key in expected)
    assert progress == [(1, 3), (2, 3), (3, 3)]


def test_best_targets():
    table = learn_translation_table(make_pairs(), 15)
    best = table.best_targets(14, 4)
    assert best.dtype == np.int32
    assert (best[12:] == -1).all()  # tokens that do not occur
    for source in range(12):
        ranked = sorted((-p, t) for s, t, p in zip(*table) if s == source)
        assert best[source].tolist() == [int(t) for _, t in ranked[:4]] + [-1] * (4 - len(ranked))


def test_no_pairs():
    for pairs in ([], [([], [])], [([], [4]), ([4], [])]):
        assert (learn_translation_table(pairs, 9).best_targets(9, 2) == -1).all()
