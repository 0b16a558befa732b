"""Detection of torch.export."""

import torch

from regard.kernels.derivatives import is_exporting


class Traced(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if is_exporting() else x


def test_export_is_detected():
    exported = torch.export.export(Traced(), (torch.zeros(2),), strict=False)
    assert exported.module()(torch.zeros(2)).tolist() == [1, 1]


def test_compilation_is_not_export(monkeypatch):
    assert torch.compile(Traced(), backend="eager")(torch.zeros(2)).tolist() == [0, 0]
    # torch 2.11 reports an export while it compiles.
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    assert not is_exporting()
