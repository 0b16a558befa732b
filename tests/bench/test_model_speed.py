"""Decoding and recording beside their peers, on shapes of no weight."""

import pytest

from regard.bench import DecodingShape, RecordingShape, bench_decoding, bench_recording, decoding_speed, recording_cost

DECODING = DecodingShape(16, 2, 1, 32, vocabulary=30, source=4, target=3, sentences=3, beam=2)
RECORDING = RecordingShape(width=16, heads=2, layers=2, vocabulary=50)


def test_decoding_beside_everybody():
    report = bench_decoding("cpu", shape=DECODING, rounds=1)
    assert [row.note for row in report.rows] == [""] * 12
    assert [row.entrant for row in report.rows[:4]] == [
        *("Regard", "transformers, generate", "CTranslate2, float32", "CTranslate2, int8"),
    ]
    assert all(row.rate == pytest.approx((1 if "1 sentence" in row.case else 3) / row.seconds) for row in report.rows)


def test_every_output_is_as_long_as_it_should_be():
    """With the same weights CTranslate2 gives the same tokens: so it does the same work."""
    words = [f"w{i}" for i in range(DECODING.vocabulary - 4)]
    translator = decoding_speed._translator(DECODING, words)
    config = decoding_speed.DecodeConfig(method="greedy", min_len=3, max_len=3)
    ((found,),) = translator.translate(["w1 w2 w3"], config)
    assert len(found.hypothesis.ids) == 3


def test_who_is_not_installed_is_named(monkeypatch):
    for module in (decoding_speed, recording_cost):
        monkeypatch.setattr(module, "installed", lambda peer: False)
    report = bench_decoding("cpu", shape=DECODING, rounds=1)
    assert report.not_installed == ("transformers", "CTranslate2")
    assert all(row.ours for row in report.rows)
    assert str(bench_recording("cpu", [4], shape=RECORDING, rounds=1)).endswith("not installed: transformers")


def test_recording_beside_transformers():
    report = bench_recording("cpu", [8], shape=RECORDING, rounds=1)
    assert [(row.case, row.entrant) for row in report.rows] == [
        ("nobody looks", "Regard"),
        ("nobody looks", "transformers, SDPA"),
        ("a head of each layer", "Regard"),
        ("a head of each layer", "transformers, output_attentions"),
        ("every weight", "Regard"),
        ("every weight", "transformers, output_attentions"),
    ]
    assert all(row.seconds for row in report.rows)
