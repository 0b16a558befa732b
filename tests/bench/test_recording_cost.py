"""Benchmark of recording on a tiny model."""

from regard.bench import RecordingShape, bench_recording, recording_cost

RECORDING = RecordingShape(width=16, heads=2, layers=2, vocabulary=50)


def test_missing_package_is_reported(monkeypatch):
    monkeypatch.setattr(recording_cost, "is_installed", lambda peer: False)
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
