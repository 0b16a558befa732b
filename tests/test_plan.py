"""tools/plan.py against what was measured, and against the bytes that torch allocates."""

import sys

import pytest
import torch

from regard.models import GPTConfig, TransformerConfig, make_model
from regard.training.optimizers import make_optimizer
from tools.plan import estimate, main


def transformer(width: int, heads: int) -> TransformerConfig:
    sizes = dict(width=width, heads=heads, feedforward=4 * width, encoder_layers=6, decoder_layers=6)
    return TransformerConfig(**sizes, source_vocab=32_000, target_vocab=32_000, shared_vocab=True)


BASE = transformer(512, 8)
CHARACTERS = GPTConfig(
    width=384, heads=6, layers=6, feedforward=1536, vocab=65, max_len=256, norm_kind="layer", positions="learned",
    activation="gelu", qk_norm=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tokens_per_second", "milliseconds", "gibibytes"),
    [
        (BASE, 1_984_000, 25.7, 6.0),
        (transformer(256, 4), 3_809_000, 13.4, 3.1),
        (transformer(1024, 16), 775_000, 65.6, 12.5),
        (BASE, 1_357_000, 9.3, None),
        (CHARACTERS, 3_366_000, 4.87, None),
    ],
    ids=["base", "width 256", "width 1024", "small batch", "characters"],
)
def test_estimates_are_within_a_tenth_of_what_was_measured(config, tokens_per_second, milliseconds, gibibytes):
    """On one H200 (benchmarks/attention.md). The first and the fourth time fix the constants."""
    memory, seconds = estimate(config, round(tokens_per_second * milliseconds / 1e3))
    assert 1e3 * sum(seconds.values()) == pytest.approx(milliseconds, rel=0.1)
    if gibibytes:
        assert sum(memory.values()) / 2**30 == pytest.approx(gibibytes, rel=0.1)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_states_are_those_of_torch(optimizer):
    config = GPTConfig(width=16, heads=2, layers=3, feedforward=24, vocab=50)
    model = make_model(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    update = make_optimizer(optimizer, model, 1e-3, 0.98, 0.0)
    update.step()
    moments = [x.nbytes for state in update.state.values() for name, x in state.items() if name != "step"]
    memory, _ = estimate(config, 0, optimizer=optimizer)
    assert memory["parameters"] == memory["gradients"] == sum(p.nbytes for p in model.parameters())
    assert memory["optimizer"] == sum(moments)
    sharded, _ = estimate(config, 0, gpus=4, fsdp=True, optimizer=optimizer)
    assert sharded["optimizer"] == sum(moments) / 4


def test_weak_scaling():
    """More GPUs never make a step faster; a slow link between nodes dominates it."""
    times = [sum(estimate(BASE, 51_200, gpus)[1].values()) for gpus in (1, 8, 64, 512)]
    assert times == sorted(times)
    assert times[-1] < 1.1 * times[0]
    _, slow = estimate(BASE, 51_200, 64, link=1e9)
    # 60.5 M gradients of 4 bytes, of which each GPU of a node exchanges an eighth: 2 · 7/8 · 30 MB at 1 GB/s
    hidden = (slow["matrix products"] + slow["memory traffic"]) / 3
    assert slow["exchange"] == pytest.approx(2 * 7 / 8 * 60.5e6 * 4 / 8 / 1e9 - hidden, abs=2e-3)
    assert estimate(BASE, 51_200, 64, link=1e9, fsdp=True)[1]["exchange"] == pytest.approx(slow["exchange"], abs=2e-3)


def test_recipe_gives_the_printed_plan(monkeypatch, capsys):
    """As in docs/planning.md."""
    monkeypatch.setattr(sys, "argv", ["plan.py", "wikitext2", *["--gpus", "64", "--tokens", "10e9", "--price", "3"]])
    main()
    assert "2.5 of 141 GB per GPU" in (output := capsys.readouterr().out)
    assert output.endswith("at 106,284,422 tokens/s\ncost    5.02\n")
    monkeypatch.setattr(sys, "argv", ["plan.py", "sst2"])
    with pytest.raises(SystemExit, match="No plan for the family bert"):
        main()
