import dataclasses
from collections import Counter

import pytest
import torch

from regard.data import IGNORED, AugmentConfig, augment, soft_targets
from regard.data.images import augmentation
from regard.data.images.image_ops import FILL
from regard.errors import RegardError

EVERYTHING = AugmentConfig(
    flip=0.5, crop=3, zoom=0.5, colour=0.4, random_ops=2, strength=0.9, cutout=4, mixup=0.8, cutmix=1.0
)


def batch(count=10, channels=3, shape=(12, 9), seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(count, channels, *shape, generator=generator)
    return pixels, soft_targets(torch.arange(count), count)


def steps(count=400, shape=(1, 5)):
    """Pictures whose pixels are numbers, so that each can be told after it was moved."""
    return torch.arange(float(shape[0] * shape[1])).view(1, 1, *shape).repeat(count, 1, 1, 1) / 100


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("count", [1, 10, 29])
def test_everything_at_once(count, channels):
    pixels, targets = batch(count, channels)
    kept = pixels.clone()
    found = augment(pixels, targets, EVERYTHING)
    assert torch.equal(pixels, kept)  # what is given is left as it was
    assert found.pixels.shape == pixels.shape
    assert found.pixels.dtype == torch.float32
    assert (found.pixels >= 0).all()
    assert (found.pixels <= 1).all()
    assert torch.allclose(found.targets.sum(1), torch.ones(count))
    assert (found.targets >= 0).all()
    assert found.masks is None


def test_nothing_changes_nothing():
    pixels, targets = batch()
    masks = torch.randint(0, 5, (10, 12, 9))
    found = augment(pixels, targets, AugmentConfig(), masks)
    assert torch.equal(found.pixels, pixels)
    assert torch.equal(found.targets, targets)
    assert torch.equal(found.masks, masks)


@pytest.mark.parametrize("option", ["flip", "crop", "zoom", "colour", "random_ops", "cutout", "mixup", "cutmix"])
def test_the_seed_decides(option):
    pixels, targets = batch()
    config = dataclasses.replace(AugmentConfig(), **{option: getattr(EVERYTHING, option)})
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(augment(pixels, targets, config))
    assert torch.equal(found[0].pixels, found[1].pixels)
    assert torch.equal(found[0].targets, found[1].targets)
    assert not torch.equal(found[0].pixels, found[2].pixels)
    assert not torch.equal(found[0].pixels, pixels)


@pytest.mark.parametrize("masked", [False, True])
def test_no_number_leaves_the_device(masked):
    """One graph without a break: no number is looked at on the way, and no other randomness than torch's is used."""
    config = dataclasses.replace(EVERYTHING, mixup=0.0 if masked else 0.8, padding="zero")
    pixels, targets = batch()
    masks = torch.randint(0, 5, (10, 12, 9)) if masked else None
    compiled = torch.compile(augment, fullgraph=True, backend="eager")
    torch.manual_seed(3)
    found = compiled(pixels, targets, config, masks)
    torch.manual_seed(3)
    wanted = augment(pixels, targets, config, masks)
    assert torch.allclose(found.pixels, wanted.pixels, atol=1e-5)
    assert torch.allclose(found.targets, wanted.targets, atol=1e-5)
    assert not masked or torch.equal(found.masks, wanted.masks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masked", [False, True])
def test_a_captured_graph_draws_anew(masked):
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
        found = augment(pixels, targets, config, masks)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(found.pixels.clone())
        assert torch.isfinite(found.pixels).all()
        assert torch.allclose(found.targets.sum(1).cpu(), torch.ones(50), atol=1e-5)
    assert not torch.equal(*seen)


@pytest.mark.filterwarnings("error")
def test_the_order_in_memory_does_not_matter():
    pixels, targets = batch(28)
    found = []
    for one in (pixels, pixels.to(memory_format=torch.channels_last)):
        torch.manual_seed(1)
        found.append(augment(one, targets, EVERYTHING).pixels)
    assert torch.allclose(*found, atol=1e-5)


def test_gradients_stay_outside():
    pixels, targets = batch()
    assert not augment(pixels.requires_grad_(), targets, EVERYTHING).pixels.requires_grad


def test_flips_are_as_frequent_as_told():
    torch.manual_seed(0)
    pixels = steps(2000)
    found = augment(pixels, None, AugmentConfig(flip=0.3)).pixels
    flipped = (found == pixels.flip(-1)).all(-1).flatten()
    assert ((found == pixels).all(-1).flatten() ^ flipped).all()
    assert 0.26 < flipped.float().mean() < 0.34


def test_every_place_of_a_crop_is_as_frequent():
    torch.manual_seed(0)
    pixels = steps(5000, (5, 5)) + 0.01
    found = augment(pixels, None, AugmentConfig(crop=2, padding="zero")).pixels
    places = Counter(found[:, 0, 2, 2].mul(100).round().int().tolist())  # the middle comes from any of 25 places
    assert sorted(places) == list(range(1, 26))
    assert min(places.values()) > 140
    assert max(places.values()) < 260
    assert (found == 0).any()
    assert (augment(pixels, None, AugmentConfig(crop=2)).pixels > 0).all()  # the mirror image has no black


def test_masks_go_where_their_pixels_go():
    """Where a mask is the same all around, the pixel must be the one that belongs to it."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 8, (40, 3, 4)).repeat_interleave(8, 1).repeat_interleave(8, 2)
    pixels = blocks[:, None] / 10
    exact = augment(pixels, None, AugmentConfig(flip=0.5, crop=5, cutmix=1.0), blocks)
    assert torch.equal(exact.pixels[:, 0], exact.masks / 10)
    assert (exact.masks != blocks).any((1, 2)).all()
    found = augment(pixels, None, AugmentConfig(flip=0.5, crop=5, zoom=0.5, padding="zero"), blocks)
    around = torch.stack([found.masks.roll((y, x), (1, 2)) for y in (-2, -1, 0, 1, 2) for x in (-2, -1, 0, 1, 2)])
    inner = (around == found.masks).all(0) & (found.masks != IGNORED)
    inner[:, [0, 1, -1, -2]] = inner[:, :, [0, 1, -1, -2]] = False
    assert inner.float().mean() > 0.1
    assert torch.allclose(found.pixels[:, 0][inner], (found.masks / 10)[inner], atol=1e-5)
    assert (found.pixels[:, 0][found.masks == IGNORED] < 0.01).all()
    assert (found.masks != blocks).any((1, 2)).all()


def test_masks_go_where_random_operations_put_their_pixels(monkeypatch):
    monkeypatch.setattr(augmentation, "_COLOURING", (lambda pixels, strength: pixels,) * 9)
    torch.manual_seed(0)
    blocks = torch.randint(0, 3, (56, 3, 4)).repeat_interleave(8, 1).repeat_interleave(8, 2)
    found = augment(blocks[:, None] / 10, None, AugmentConfig(random_ops=1, strength=1.0), blocks)
    changed = (found.masks != blocks).any((1, 2))
    assert 15 < changed.sum() <= 5 * 4  # five of the fourteen operations move pixels, if far enough
    around = torch.stack([found.masks.roll((y, x), (1, 2)) for y in (-1, 0, 1) for x in (-1, 0, 1)])
    inner = (around == found.masks).all(0)[:, 1:-1, 1:-1]
    wanted = torch.where(found.masks == IGNORED, FILL, found.masks / 10)[:, 1:-1, 1:-1]
    assert inner[changed].float().mean() > 0.3
    assert torch.allclose(found.pixels[:, 0, 1:-1, 1:-1][inner], wanted[inner], atol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 14, 20])
def test_every_operation_has_its_turn(monkeypatch, count):
    """Whatever the size of the batch, each of the pictures has each operation with the same probability."""
    marks = [lambda pixels, _, mark=mark: pixels + mark for mark in range(5, 14)]
    monkeypatch.setattr(augmentation, "_COLOURING", tuple(marks))

    def warped(pixels, masks, strength):
        assert len(pixels) % 5 == 0
        return pixels + torch.arange(5.0).repeat_interleave(len(pixels) // 5)[:, None, None, None], masks

    monkeypatch.setattr(augmentation, "_warped", warped)
    torch.manual_seed(0)
    own = 100.0 * torch.arange(count)[:, None, None, None]
    seen = Counter()
    for _ in range(1400):
        found = augment(own.expand(-1, 1, 2, 2), None, AugmentConfig(random_ops=1)).pixels - own
        assert torch.equal(found[:, 0, 0, 0], found[:, 0, 1, 1])
        seen.update(enumerate(found[:, 0, 0, 0].int().tolist()))
    assert {place for place, _ in seen} == set(range(count))
    assert {op for _, op in seen} == set(range(14))
    # 100 times each on average, with a deviation of 10
    assert min(seen[place, op] for place in range(count) for op in range(14)) > 55
    assert max(seen.values()) < 150


def test_strength_is_a_limit():
    torch.manual_seed(0)
    pixels, _ = batch(560, shape=(16, 16))
    still = augment(pixels, None, AugmentConfig(random_ops=1, strength=0.0)).pixels
    # Without any strength only stretching and equalising change a picture by more than rounding.
    changed = ((still - pixels).abs() > 1e-3).flatten(1).any(1)
    assert changed.float().mean() <= 3 / 14
    weak, strong = (
        (augment(pixels, None, AugmentConfig(random_ops=1, strength=one)).pixels - pixels).abs().mean()
        for one in (0.2, 1.0)
    )
    assert 2 * weak < strong


def test_zoom_shows_a_part_of_the_picture():
    torch.manual_seed(0)
    ramp = torch.linspace(0, 1, 64)
    pixels = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64)]).expand(500, 2, 64, 64)
    found = augment(pixels, None, AugmentConfig(zoom=0.3)).pixels
    sides = found.amax((2, 3)) - found.amin((2, 3))
    area, ratio = sides.prod(1), sides[:, 0] / sides[:, 1]
    assert 0.27 < area.min() < 0.33
    assert 0.9 < area.max() <= 1.0001
    assert 0.70 < ratio.min() < 0.78
    assert 1.28 < ratio.max() < 1.40
    assert (found >= 0).all()
    assert found.amin((0, 2, 3)).max() < 0.02  # every part of it is shown to somebody
    assert found.amax((0, 2, 3)).min() > 0.98


def test_colours_change_by_no_more_than_told():
    torch.manual_seed(0)
    pixels = torch.full((500, 3, 4, 4), 0.5)
    found = augment(pixels, None, AugmentConfig(colour=0.4)).pixels[
        :, 0, 0, 0
    ]  # contrast and saturation do nothing here
    assert 0.29 < found.min() < 0.31
    assert 0.69 < found.max() < 0.71
    grey = augment(pixels[:, :1], None, AugmentConfig(colour=0.4)).pixels
    assert grey.shape == (500, 1, 4, 4)


def test_cutout_paints_a_square():
    torch.manual_seed(0)
    pixels = torch.zeros(400, 3, 12, 9)
    painted = augment(pixels, None, AugmentConfig(cutout=4)).pixels
    assert set(painted.unique().tolist()) == {0.0, FILL}
    sizes = (painted[:, 0] == FILL).sum((1, 2))
    assert sizes.max() == 16
    assert 0 < sizes.min() < 16  # cut off at the border
    assert torch.equal(painted[:, 0], painted[:, 2])


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"cutmix": 0.4}, {"mixup": 0.8, "cutmix": 1.0}])
def test_targets_are_mixed_as_the_pixels_are(options):
    """Pictures of one shade each: the mean of a mixed one tells the shares."""
    torch.manual_seed(0)
    count = 600
    shades = torch.rand(count)
    pixels = shades[:, None, None, None].expand(count, 3, 16, 16)
    found = augment(pixels, soft_targets(torch.arange(count), count), AugmentConfig(**options))
    assert torch.allclose(found.targets.sum(1), torch.ones(count))
    assert torch.allclose(found.targets @ shades, found.pixels.mean((1, 2, 3)), atol=1e-5)
    own = found.targets.diagonal()
    other = found.targets.roll(1, 1).diagonal()  # of the one before
    assert torch.allclose(own + other, torch.ones(count), atol=1e-5)
    several = (found.pixels.amax((1, 2, 3)) - found.pixels.amin((1, 2, 3)) > 1e-4).float().mean()
    assert several == 0 if "cutmix" not in options else several > (0.6 if "mixup" not in options else 0.3)
    if options == {"mixup": 0.4}:
        assert abs(own.mean() - 0.5) < 0.05
        assert abs(own.var() - 1 / (4 * 1.8)) < 0.02  # the variance of the beta distribution


def test_targets_that_count_for_nothing_stay_so():
    labels = torch.tensor([2, IGNORED, 0])
    assert soft_targets(labels, 3, smoothing=0.3).tolist() == [
        pytest.approx([0.1, 0.1, 0.8]),
        [0, 0, 0],
        pytest.approx([0.8, 0.1, 0.1]),
    ]


@pytest.mark.parametrize(
    "options",
    [
        *({"flip": 1.1}, {"crop": -1}, {"padding": "edge"}, {"zoom": 0.0}, {"colour": 2.0}, {"random_ops": -1}),
        *({"strength": 1.5}, {"cutout": -1}, {"mixup": -0.1}, {"cutmix": -1.0}),
    ],
)
def test_options_out_of_range(options):
    ((name, value),) = options.items()
    with pytest.raises(RegardError, match=rf"^augment\.{name} must be .* \(got {value!r}\)\. \w+"):
        AugmentConfig(**options)


def test_what_cannot_be_mixed():
    pixels, targets = batch()
    masks = torch.zeros(10, 12, 9, dtype=torch.long)
    for config, given in (
        (AugmentConfig(mixup=0.2), (None, None)),
        (AugmentConfig(mixup=0.2), (targets, masks)),
        (AugmentConfig(cutmix=0.2), (None, None)),
    ):
        with pytest.raises(RegardError, match=r"^(Mixup blends|Cutmix mixes)"):
            augment(pixels, given[0], config, given[1])
    with pytest.raises(RegardError, match=r"^crop = 9 moves whole pictures away"):
        augment(pixels, None, AugmentConfig(crop=9))
