"""What a run says on a terminal."""

import io

from rich.console import Console

from regard.train import report as reports


def test_a_terminal_gets_a_bar_with_the_loss_and_a_line_for_each_validation(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(reports, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    with reports.Report(tmp_path / "metrics.jsonl", steps=10) as report:
        report.add(5, "train", loss=1.5, nll=1.25)
        report.add(5, "validation", nll=2.0, bleu=31.0)
        report.bar.refresh()
    shown = screen.getvalue()
    assert "loss 1.500" in shown
    assert "step 5  validation  nll 2  bleu 31" in shown
    assert "None" not in shown
    assert [line["kind"] for line in reports.read_metrics(tmp_path / "metrics.jsonl")] == ["train", "validation"]
