"""Benchmarks of decoding and recording on tiny models."""

import pytest

from regard.bench import DecodingShape, RecordingShape, bench_decoding, bench_recording, decoding_speed, recording_cost

DECODING = DecodingShape(16, 2, 1, 32, vocabulary=30, source=4, target=3, sentences=3, beam=2)
RECORDING = RecordingShape(width=16, heads=2, layers=2, vocabulary=50)


def test_decoding_against_all_peers():
    report = bench_decoding("cpu", shape=DECODING, rounds=1)
    assert [row.note for row in report.rows] == [""] * 12
    assert [row.implementation for row in report.rows[:4]] == [
        *("Regard", "transformers, generate", "CTranslate2, float32", "CTranslate2, int8"),
    ]
    assert all(row.rate == pytest.approx((1 if "1 sentence" in row.case else 3) / row.seconds) for row in report.rows)


def test_outputs_have_the_requested_length():
    """All implementations generate the same number of tokens, so the work is the same."""
    words = [f"w{i}" for i in range(DECODING.vocabulary - 4)]
    translator = decoding_speed._make_translator(DECODING, words)
    config = decoding_speed.DecodeConfig(method="greedy", min_len=3, max_len=3)
    ((translation,),) = translator.translate(["w1 w2 w3"], config)
    assert len(translation.hypothesis.ids) == 3


def test_missing_packages_are_reported(monkeypatch):
    for module in (decoding_speed, recording_cost):
        monkeypatch.setattr(module, "is_installed", lambda peer: False)
    report = bench_decoding("cpu", shape=DECODING, rounds=1)
    assert report.not_installed == ("transformers", "CTranslate2")
    assert all(row.is_regard for row in report.rows)
    assert str(bench_recording("cpu", [4], shape=RECORDING, rounds=1)).endswith("not installed: transformers")


def test_recording_against_transformers():
    report = bench_recording("cpu", [8], shape=RECORDING, rounds=1)
    assert [(row.case, row.implementation) for row in report.rows] == [
        ("no recording", "Regard"),
        ("no recording", "transformers, SDPA"),
        ("one head per layer", "Regard"),
        ("one head per layer", "transformers, output_attentions"),
        ("all weights", "Regard"),
        ("all weights", "transformers, output_attentions"),
    ]
    assert all(row.seconds for row in report.rows)
