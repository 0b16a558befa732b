"""Tensor parallelism: outputs, gradients, losses and checkpoints are those of one process."""

import contextlib
import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import regard
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.models import BertConfig, GPTConfig, TransformerConfig, ViTConfig, make_model
from regard.training import Recipe, run_recipe
from regard.training.optim.local_shards import total_norm
from regard.training.optim.optimizers import make_optimizer
from regard.training.run.checkpoint_store import CheckpointStore
from regard.training.run.run_setup import count_ranks
from regard.training.runtime.sharded_checkpoint import load_like
from regard.training.runtime.tensor_parallel import TensorParallel
from regard.training.runtime.workers import join_torchrun
from tests.training.helpers import error_message, fail_after, losses, small_dataset, small_recipe
from tests.training.runtime.ranks import run_ranks
from tests.training.toy_tasks import toy

STEPS, SAVED, FAILED = 20, 10, 13
TRAIN = dict(steps=STEPS, save_every=SAVED, validate_every=STEPS, log_every=1)
SIZES: dict[str, Any] = dict(width=16, heads=4, feedforward=12, dropout=0.0)


def train(job: Recipe, out: Path) -> None:
    dataset = small_dataset() if job.task == "translate" else None
    run_recipe(job, out, dataset=dataset, quiet=True)


def train_and_fail(job: Recipe, out: Path) -> None:
    """Train, with an error after FAILED updates on all ranks."""
    fail_after(FAILED)
    with contextlib.suppress(RegardError):
        train(job, out)


@pytest.fixture(scope="module")
def translator(tmp_path_factory) -> Path:
    """Runs of a Transformer: on one process; and on two ranks, which share all dropout, then resumed on one process."""
    folder = tmp_path_factory.mktemp("translator")
    sizes = SIZES | dict(dropout=0.2, kv_heads=2, activation="geglu", positions="relative", cross_score="general")

    def job(**changes: Any) -> Recipe:
        return small_recipe(
            model=sizes, train=TRAIN | dict(validate_every=SAVED, ema=0.9, optimizer="muon", clip=0.5) | changes
        )

    train(job(), folder / "one")
    assert run_ranks(2, train_and_fail, job(tensor_parallel=2), folder / "two") == [0, 2]
    shutil.copytree(folder / "two", folder / "resumed")
    train(job(), folder / "resumed")
    return folder


@pytest.fixture(scope="module")
def generator(tmp_path_factory) -> Path:
    """Runs of a GPT with grouped-query attention: on one process; and on 2 × 2 ranks, then resumed with FSDP."""
    folder = tmp_path_factory.mktemp("generator")
    sizes = SIZES | dict(kv_heads=2, activation="swiglu", qk_norm=True, bias="all")

    def job(**changes: Any) -> Recipe:
        return toy("language", folder, model=sizes, train=TRAIN | dict(optimizer="adamw", clip=0.5) | changes)

    train(job(), folder / "one")
    assert run_ranks(4, train_and_fail, job(tensor_parallel=2), folder / "four") == [0, 2, 2, 2]
    assert run_ranks(4, train, job(tensor_parallel=2, sharding="fsdp"), folder / "four") == [0] * 4
    return folder


def check_same_run(one: Path, other: Path) -> None:
    assert len(losses(one)) == STEPS
    torch.testing.assert_close(losses(other), losses(one), rtol=1e-5, atol=0)
    expected, found = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in expected.items()}
    for name, tensor in expected.items():
        if not name.endswith("key_value.bias"):  # without gradient apart from rounding, which the optimizer scales up
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def test_2x2_ranks_train_a_gpt_like_one_process(generator):
    check_same_run(generator / "one", generator / "four")


def test_two_ranks_train_a_transformer_like_one_process(translator):
    check_same_run(translator / "one", translator / "resumed")


def test_a_checkpoint_of_two_ranks_loads_on_one_process(translator):
    """Its EMA is bit-equal to the model that rank 0 gathered and saved at the same step."""
    two = translator / "two"
    model = regard.load(two).model
    groups = make_optimizer("muon", model, 1e-3, 0.98, 0.0).param_groups
    parameters = [p for group in groups for p in group["params"]]
    checkpoint = load_like(CheckpointStore(two).find_intact(), dict(model.named_parameters()), parameters)
    assert checkpoint.facts["step"] == SAVED
    saved = load_file(two / "model.safetensors")
    assert all(torch.equal(checkpoint.tensors[f"average.{name}"], tensor) for name, tensor in saved.items())
    for index, parameter in enumerate(parameters):
        states = [x for name, x in checkpoint.tensors.items() if name.startswith(f"optimizer.{index}.") and x.dim()]
        assert states
        assert all(state.shape == parameter.shape for state in states)


TEXTS = pack([[2, 5, 6, 7], [2, 8], [2, 9, 4, 4, 10]])
IMAGES = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
VISION: dict[str, Any] = SIZES | dict(layers=2, channels=1, image_height=8, image_width=8, patch=4)
MODELS: list[tuple[Any, tuple[Any, ...]]] = [
    (
        TransformerConfig(
            **SIZES,
            encoder_layers=1,
            decoder_layers=1,
            norm="post",
            encoder_score="cosine",
            cross_score="concat",
            source_vocab=11,
            target_vocab=11,
            shared_vocab=True,
        ),
        (TEXTS, TEXTS),
    ),
    (GPTConfig(**SIZES, layers=2, kv_heads=2, head_width=6, activation="swiglu", vocab=11), (TEXTS,)),
    (BertConfig(**SIZES, layers=2, vocab=11, score="location", max_len=8), (TEXTS,)),
    (ViTConfig(**VISION, labels=("a", "b"), pooling="query", layer_scale=0.1, qk_norm=True), (IMAGES,)),
    (ViTConfig(**VISION, labels=("a", "b"), head="segment", segmenter="queries"), (IMAGES,)),
    (ViTConfig(**VISION, labels=("a", "b")), (IMAGES,)),
]


def compare_with_the_whole_model() -> None:
    """Outputs, gradients and their norm; each rank stores its part alone."""
    with join_torchrun() as workers:
        workers.tensor_parallel = 2
        tensor_parallel = TensorParallel(workers, torch.device("cpu"), is_sharded=False)
        for config, inputs in MODELS:
            torch.manual_seed(1)
            whole = make_model(config)
            parts = copy.deepcopy(whole)
            tensor_parallel.divide(parts)
            assert [name for name, _ in parts.named_parameters()] == [name for name, _ in whole.named_parameters()]
            expected, found = whole(*inputs), parts(*inputs)
            torch.testing.assert_close(found, expected)
            direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
            for output in (expected, found):
                (output * direction).sum().backward()
            tensor_parallel.sum_gradients(dict(parts.named_parameters()))
            grads = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
            norm = total_norm([p.grad for p in parts.parameters() if p.grad is not None])
            torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(grads.values()))
            for name, part in parts.named_parameters():
                assert isinstance(part, DTensor)
                assert part.to_local().untyped_storage().nbytes() == 4 * part.to_local().numel()
                if name in grads:
                    full, scale = part.grad.full_tensor().view_as(grads[name]), 1 + grads[name].abs().max().item()
                    torch.testing.assert_close(full, grads[name], rtol=0, atol=1e-5 * scale, msg=f"{config}: {name}")
            layers = [
                p for name, p in parts.named_parameters() if name.endswith(("attention.query.weight", "outer.weight"))
            ]
            assert layers
            assert all(2 * p.to_local().numel() == p.numel() for p in layers)


def test_outputs_and_gradients_are_those_of_the_whole_model():
    assert run_ranks(2, compare_with_the_whole_model) == [0, 0]


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ({"heads": 4}, {"tensor_parallel": 0}, "train.tensor_parallel must be between 1 and 1,024 (got 0)"),
        ({"heads": 2}, {"tensor_parallel": 4}, "model.heads is 2; it must be a multiple of train.tensor_parallel (4)"),
        ({"heads": 4, "kv_heads": 1}, {"tensor_parallel": 2}, "model.kv_heads is 1; it must be a multiple of"),
        ({"heads": 4, "feedforward": 9}, {"tensor_parallel": 2}, "model.feedforward is 9; it must be a multiple of"),
        ({"heads": 4}, {"tensor_parallel": 2}, "the number of ranks (3) must be a multiple of it"),
        ({"heads": 4}, {"tensor_parallel": 2, "compile": True}, "train.compile does not support tensor parallelism"),
        ({"family": "seq2seq"}, {"tensor_parallel": 2}, "the recurrent layers of the family seq2seq cannot be divided"),
    ],
)
def test_invalid_settings_are_errors_before_data_is_read(tmp_path, model, settings, message):
    sections = {"model": model, "train": {"workers": 3, "device": "cpu"} | settings}
    with pytest.raises(RegardError) as caught:
        regard.train("no-such-file.tsv", out=tmp_path / "model", **sections)
    assert message in str(caught.value)
    if settings["tensor_parallel"]:
        recipe = Recipe().override(data={"files": ["no-such-file.tsv"]}, **sections)
        assert message in error_message(recipe, tmp_path / "model")


def test_the_default_number_of_workers_is_a_multiple(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(7), raising=False)
    recipe = Recipe().override(train={"tensor_parallel": 2, "device": "cpu"})
    assert count_ranks(recipe, None) == 6
    assert count_ranks(recipe.override(train={"tensor_parallel": 8}), None) == 8
