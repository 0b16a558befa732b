import dataclasses
from collections import Counter

import pytest
import torch

from regard.data import AugmentConfig, augment, one_hot_targets
from regard.data.batching.batch import IGNORE_INDEX
from regard.data.images import augmentation
from regard.data.images.augmentation import FILL
from regard.errors import RegardError

EVERYTHING = AugmentConfig(
    flip=0.5, crop=3, zoom=0.5, color=0.4, random_ops=2, strength=0.9, cutout=4, mixup=0.8, cutmix=1.0
)


def batch(count=10, channels=3, shape=(12, 9), seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(count, channels, *shape, generator=generator)
    return pixels, one_hot_targets(torch.arange(count), count)


def steps(count=400, shape=(1, 5)):
    """Images with a different value for each pixel, so that pixels can be recognized after a translation."""
    return torch.arange(float(shape[0] * shape[1])).view(1, 1, *shape).repeat(count, 1, 1, 1) / 100


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("count", [1, 10, 29])
def test_all_operations_together(count, channels):
    pixels, targets = batch(count, channels)
    kept = pixels.clone()
    result = augment(pixels, targets, EVERYTHING)
    assert torch.equal(pixels, kept)  # the input is not modified
    assert result.pixels.shape == pixels.shape
    assert result.pixels.dtype == torch.float32
    assert (result.pixels >= 0).all()
    assert (result.pixels <= 1).all()
    assert torch.allclose(result.targets.sum(1), torch.ones(count))
    assert (result.targets >= 0).all()
    assert result.masks is None


def test_default_config_changes_nothing():
    pixels, targets = batch()
    masks = torch.randint(0, 5, (10, 12, 9))
    result = augment(pixels, targets, AugmentConfig(), masks)
    assert torch.equal(result.pixels, pixels)
    assert torch.equal(result.targets, targets)
    assert torch.equal(result.masks, masks)


@pytest.mark.parametrize("option", ["flip", "crop", "zoom", "color", "random_ops", "cutout", "mixup", "cutmix"])
def test_result_depends_on_the_seed(option):
    pixels, targets = batch()
    config = dataclasses.replace(AugmentConfig(), **{option: getattr(EVERYTHING, option)})
    result = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        result.append(augment(pixels, targets, config))
    assert torch.equal(result[0].pixels, result[1].pixels)
    assert torch.equal(result[0].targets, result[1].targets)
    assert not torch.equal(result[0].pixels, result[2].pixels)
    assert not torch.equal(result[0].pixels, pixels)


@pytest.mark.parametrize("masked", [False, True])
def test_augment_compiles_to_one_graph(masked):
    """One graph without a break: no value is read by the host, and all randomness comes from torch."""
    config = dataclasses.replace(EVERYTHING, mixup=0.0 if masked else 0.8, padding="zero")
    pixels, targets = batch()
    masks = torch.randint(0, 5, (10, 12, 9)) if masked else None
    compiled = torch.compile(augment, fullgraph=True, backend="eager")
    torch.manual_seed(3)
    result = compiled(pixels, targets, config, masks)
    torch.manual_seed(3)
    expected = augment(pixels, targets, config, masks)
    assert torch.allclose(result.pixels, expected.pixels, atol=1e-5)
    assert torch.allclose(result.targets, expected.targets, atol=1e-5)
    assert not masked or torch.equal(result.masks, expected.masks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masked", [False, True])
def test_replayed_graph_samples_anew(masked):
    config = dataclasses.replace(EVERYTHING, mixup=0.0 if masked else 0.8)
    pixels, targets = (one.cuda() for one in batch(50))
    masks = torch.randint(0, 5, (50, 12, 9), device="cuda") if masked else None
    torch.cuda.set_sync_debug_mode("error")
    torch.use_deterministic_algorithms(True)
    try:
        augment(pixels, targets, config, masks)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = augment(pixels, targets, config, masks)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(result.pixels.clone())
        assert torch.isfinite(result.pixels).all()
        assert torch.allclose(result.targets.sum(1).cpu(), torch.ones(50), atol=1e-5)
    assert not torch.equal(*seen)


@pytest.mark.filterwarnings("error")
def test_memory_format_does_not_matter():
    pixels, targets = batch(28)
    result = []
    for one in (pixels, pixels.to(memory_format=torch.channels_last)):
        torch.manual_seed(1)
        result.append(augment(one, targets, EVERYTHING).pixels)
    assert torch.allclose(*result, atol=1e-5)


def test_output_needs_no_gradient():
    pixels, targets = batch()
    assert not augment(pixels.requires_grad_(), targets, EVERYTHING).pixels.requires_grad


def test_flip_probability():
    torch.manual_seed(0)
    pixels = steps(2000)
    result = augment(pixels, None, AugmentConfig(flip=0.3)).pixels
    flipped = (result == pixels.flip(-1)).all(-1).flatten()
    assert ((result == pixels).all(-1).flatten() ^ flipped).all()
    assert 0.26 < flipped.float().mean() < 0.34


def test_crop_offsets_are_uniform():
    torch.manual_seed(0)
    pixels = steps(5000, (5, 5)) + 0.01
    result = augment(pixels, None, AugmentConfig(crop=2, padding="zero")).pixels
    offsets = Counter(result[:, 0, 2, 2].mul(100).round().int().tolist())  # the center comes from any of 25 positions
    assert sorted(offsets) == list(range(1, 26))
    assert min(offsets.values()) > 140
    assert max(offsets.values()) < 260
    assert (result == 0).any()
    assert (augment(pixels, None, AugmentConfig(crop=2)).pixels > 0).all()  # reflection adds no black


def test_masks_follow_their_pixels():
    """Inside areas of equal mask values, pixels must match their mask."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 8, (40, 3, 4)).repeat_interleave(8, 1).repeat_interleave(8, 2)
    pixels = blocks[:, None] / 10
    exact = augment(pixels, None, AugmentConfig(flip=0.5, crop=5, cutmix=1.0), blocks)
    assert torch.equal(exact.pixels[:, 0], exact.masks / 10)
    assert (exact.masks != blocks).any((1, 2)).all()
    result = augment(pixels, None, AugmentConfig(flip=0.5, crop=5, zoom=0.5, padding="zero"), blocks)
    around = torch.stack([result.masks.roll((y, x), (1, 2)) for y in (-2, -1, 0, 1, 2) for x in (-2, -1, 0, 1, 2)])
    inner = (around == result.masks).all(0) & (result.masks != IGNORE_INDEX)
    inner[:, [0, 1, -1, -2]] = inner[:, :, [0, 1, -1, -2]] = False
    assert inner.float().mean() > 0.1
    assert torch.allclose(result.pixels[:, 0][inner], (result.masks / 10)[inner], atol=1e-5)
    assert (result.pixels[:, 0][result.masks == IGNORE_INDEX] < 0.01).all()
    assert (result.masks != blocks).any((1, 2)).all()


def test_masks_follow_random_operations(monkeypatch):
    monkeypatch.setattr(augmentation, "_COLOR_OPS", (lambda pixels, strength: pixels,) * 9)
    torch.manual_seed(0)
    blocks = torch.randint(0, 3, (56, 3, 4)).repeat_interleave(8, 1).repeat_interleave(8, 2)
    result = augment(blocks[:, None] / 10, None, AugmentConfig(random_ops=1, strength=1.0), blocks)
    changed = (result.masks != blocks).any((1, 2))
    assert 15 < changed.sum() <= 5 * 4  # five of the fourteen operations are geometric
    around = torch.stack([result.masks.roll((y, x), (1, 2)) for y in (-1, 0, 1) for x in (-1, 0, 1)])
    inner = (around == result.masks).all(0)[:, 1:-1, 1:-1]
    expected = torch.where(result.masks == IGNORE_INDEX, FILL, result.masks / 10)[:, 1:-1, 1:-1]
    assert inner[changed].float().mean() > 0.3
    assert torch.allclose(result.pixels[:, 0, 1:-1, 1:-1][inner], expected[inner], atol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 14, 20])
def test_random_operations_are_uniform(monkeypatch, count):
    """For any batch size, each image gets each operation with the same probability."""
    marks = [lambda pixels, _, mark=mark: pixels + mark for mark in range(5, 14)]
    monkeypatch.setattr(augmentation, "_COLOR_OPS", tuple(marks))

    def random_affine(pixels, masks, strength):
        assert len(pixels) % 5 == 0
        return pixels + torch.arange(5.0).repeat_interleave(len(pixels) // 5)[:, None, None, None], masks

    monkeypatch.setattr(augmentation, "_random_affine", random_affine)
    torch.manual_seed(0)
    base = 100.0 * torch.arange(count)[:, None, None, None]
    seen = Counter()
    for _ in range(1400):
        result = augment(base.expand(-1, 1, 2, 2), None, AugmentConfig(random_ops=1)).pixels - base
        assert torch.equal(result[:, 0, 0, 0], result[:, 0, 1, 1])
        seen.update(enumerate(result[:, 0, 0, 0].int().tolist()))
    assert {index for index, _ in seen} == set(range(count))
    assert {op for _, op in seen} == set(range(14))
    # 100 times each on average, with a standard deviation of 10
    assert min(seen[index, op] for index in range(count) for op in range(14)) > 55
    assert max(seen.values()) < 150


def test_strength_limits_the_change():
    torch.manual_seed(0)
    pixels, _ = batch(560, shape=(16, 16))
    unchanged = augment(pixels, None, AugmentConfig(random_ops=1, strength=0.0)).pixels
    # At strength 0 only autocontrast and equalize change an image by more than rounding.
    changed = ((unchanged - pixels).abs() > 1e-3).flatten(1).any(1)
    assert changed.float().mean() <= 3 / 14
    weak, strong = (
        (augment(pixels, None, AugmentConfig(random_ops=1, strength=strength)).pixels - pixels).abs().mean()
        for strength in (0.2, 1.0)
    )
    assert 2 * weak < strong


def test_zoom_shows_a_part_of_the_image():
    torch.manual_seed(0)
    ramp = torch.linspace(0, 1, 64)
    pixels = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64)]).expand(500, 2, 64, 64)
    result = augment(pixels, None, AugmentConfig(zoom=0.3)).pixels
    sides = result.amax((2, 3)) - result.amin((2, 3))
    area, ratio = sides.prod(1), sides[:, 0] / sides[:, 1]
    assert 0.27 < area.min() < 0.33
    assert 0.9 < area.max() <= 1.0001
    assert 0.70 < ratio.min() < 0.78
    assert 1.28 < ratio.max() < 1.40
    assert (result >= 0).all()
    assert result.amin((0, 2, 3)).max() < 0.02  # every part of the image occurs
    assert result.amax((0, 2, 3)).min() > 0.98


def test_color_changes_are_limited():
    torch.manual_seed(0)
    pixels = torch.full((500, 3, 4, 4), 0.5)
    # Contrast and saturation have no effect on these images.
    result = augment(pixels, None, AugmentConfig(color=0.4)).pixels[:, 0, 0, 0]
    assert 0.29 < result.min() < 0.31
    assert 0.69 < result.max() < 0.71
    gray = augment(pixels[:, :1], None, AugmentConfig(color=0.4)).pixels
    assert gray.shape == (500, 1, 4, 4)


def test_cutout_fills_a_square():
    torch.manual_seed(0)
    pixels = torch.zeros(400, 3, 12, 9)
    painted = augment(pixels, None, AugmentConfig(cutout=4)).pixels
    assert set(painted.unique().tolist()) == {0.0, FILL}
    sizes = (painted[:, 0] == FILL).sum((1, 2))
    assert sizes.max() == 16
    assert 0 < sizes.min() < 16  # clipped at the border
    assert torch.equal(painted[:, 0], painted[:, 2])


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"cutmix": 0.4}, {"mixup": 0.8, "cutmix": 1.0}])
def test_targets_are_mixed_like_the_pixels(options):
    """Images of one brightness each: the mean of a mixed image gives the mixing weights."""
    torch.manual_seed(0)
    count = 600
    brightness = torch.rand(count)
    pixels = brightness[:, None, None, None].expand(count, 3, 16, 16)
    result = augment(pixels, one_hot_targets(torch.arange(count), count), AugmentConfig(**options))
    assert torch.allclose(result.targets.sum(1), torch.ones(count))
    assert torch.allclose(result.targets @ brightness, result.pixels.mean((1, 2, 3)), atol=1e-5)
    own = result.targets.diagonal()
    other = result.targets.roll(1, 1).diagonal()  # weight of the previous image
    assert torch.allclose(own + other, torch.ones(count), atol=1e-5)
    has_two_values = (result.pixels.amax((1, 2, 3)) - result.pixels.amin((1, 2, 3)) > 1e-4).float().mean()
    assert has_two_values == 0 if "cutmix" not in options else has_two_values > (0.6 if "mixup" not in options else 0.3)
    if options == {"mixup": 0.4}:
        assert abs(own.mean() - 0.5) < 0.05
        assert abs(own.var() - 1 / (4 * 1.8)) < 0.02  # the variance of the beta distribution


def test_ignored_labels_have_zero_targets():
    labels = torch.tensor([2, IGNORE_INDEX, 0])
    assert one_hot_targets(labels, 3).tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    "options",
    [
        *({"flip": 1.1}, {"crop": -1}, {"padding": "edge"}, {"zoom": 0.0}, {"color": 2.0}, {"random_ops": -1}),
        *({"strength": 1.5}, {"cutout": -1}, {"mixup": -0.1}, {"cutmix": -1.0}),
    ],
)
def test_options_out_of_range_are_errors(options):
    ((name, value),) = options.items()
    with pytest.raises(RegardError, match=rf"^augment\.{name} must be .* \(got {value!r}\)\. \w+"):
        AugmentConfig(**options)


def test_invalid_combinations_are_errors():
    pixels, targets = batch()
    masks = torch.zeros(10, 12, 9, dtype=torch.long)
    for config, given in (
        (AugmentConfig(mixup=0.2), (None, None)),
        (AugmentConfig(mixup=0.2), (targets, masks)),
        (AugmentConfig(cutmix=0.2), (None, None)),
    ):
        with pytest.raises(RegardError, match=r"^augment\.(mixup needs labels|cutmix needs labels or masks)"):
            augment(pixels, given[0], config, given[1])
    with pytest.raises(RegardError, match=r"^augment\.crop is 9; it must be smaller than the image \(9 x 12 pixels\)"):
        augment(pixels, None, AugmentConfig(crop=9))
