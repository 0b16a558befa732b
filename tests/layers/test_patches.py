"""Patch embedding, packed images, positions of patches, drop path, LayerScale and heads over tokens."""

import math

import pytest
import torch
from torch import nn

from regard.attention import Offsets, causal
from regard.errors import RegardError
from regard.layers.attention import MultiHeadAttention
from regard.layers.blocks import BlockConfig, Residual, first_tokens
from regard.layers.dropout import DropPath
from regard.layers.embeddings import ImageEmbedding
from regard.layers.heads import AttentionPooling, SegmentationDecoder
from regard.layers.patches import (
    PackedImages,
    PatchEmbedding,
    extend_offsets,
    gather_rows,
    join_patches,
    pack_images,
    patch_coordinates,
    prepend_prefix,
    remove_prefix,
    split_patches,
)
from regard.layers.positions import LearnedGrid, RotaryGrid, Sinusoidal, SinusoidalGrid, apply_rotary, bicubic_weights

# Odd numbers of patches and grids that are not square.
SIZES = [(12, 20), (4, 4), (28, 12), (12, 20)]


def make_images(channels: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.rand(channels, *size) for size in SIZES]


# -- patch embedding ---------------------------------------------------------------------------------------------------


def test_patches_hold_the_pixels_of_the_image():
    image = torch.rand(2, 3, 12, 20)
    patches = split_patches(image, 4)
    assert patches.shape == (2, 15, 48)
    for i, (row, column) in enumerate(patch_coordinates((3, 5))[0].tolist()):
        square = image[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        assert torch.equal(patches[:, i], square.flatten(1))
    assert torch.equal(join_patches(patches, (3, 5), 4), image)


@pytest.mark.parametrize("patch", [1, 3, 4])
def test_linear_and_convolution_are_equal(patch):
    linear, convolution = PatchEmbedding(3, 16, patch), PatchEmbedding(3, 16, patch, "convolution")
    with torch.no_grad():
        convolution.project.weight.copy_(linear.project.weight.view(16, 3, patch, patch))
        convolution.project.bias.copy_(linear.project.bias)
    image = torch.rand(2, 3, 12, 24)
    torch.testing.assert_close(linear(image), convolution(image))
    packed = pack_images(list(image), patch)
    torch.testing.assert_close(linear(packed), convolution(packed))
    torch.testing.assert_close(linear(packed), linear(image).flatten(0, 1))


@pytest.mark.parametrize("kind", ["linear", "convolution", "stem"])
def test_packed_images_match_single_images(kind):
    patches = PatchEmbedding(1, 16, 4, kind)
    alone = [patches(image[None])[0] for image in make_images(1)]
    torch.testing.assert_close(patches(pack_images(make_images(1), 4)), torch.cat(alone))


def test_only_a_stem_depends_on_neighboring_patches():
    image = torch.rand(1, 3, 12, 12)
    other = image.clone()
    other[:, :, 3, 3] += 1  # the last pixel of the first patch
    for kind, changed in (("linear", 1), ("stem", 9)):
        patches = PatchEmbedding(3, 16, 4, kind)
        differing = (patches(image) - patches(other)).abs().amax(-1) > 1e-6
        assert differing.sum() == changed
    with pytest.raises(RegardError, match=r"power of 2 \(got 6\)"):
        PatchEmbedding(3, 16, 6, "stem")


@pytest.mark.parametrize("kind", ["linear", "convolution", "stem"])
def test_sides_that_are_not_multiples_of_the_patch_raise(kind):
    with pytest.raises(RegardError, match=r"14×20 pixels does not divide into patches of 4×4\. .* multiples of 4"):
        PatchEmbedding(3, 16, 4, kind)(torch.rand(1, 3, 14, 20))
    with pytest.raises(RegardError, match="20×14"):
        pack_images([torch.rand(3, 20, 14)], 4)
    with pytest.raises(RegardError, match=r"patch size must be at least 1 \(got 0\)"):
        pack_images([torch.rand(3, 20, 14)], 0)


# -- packed images -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "convolution", "stem"])
def test_tokens_of_consecutive_sizes_match_single_images(kind):
    images = [torch.rand(3, *size) for size in ((12, 8), (12, 8), (4, 16), (12, 8))]  # equal sizes, adjacent and not
    patches = PatchEmbedding(3, 16, 4, kind)
    alone = torch.cat([patches(image[None])[0] for image in images])
    torch.testing.assert_close(patches(pack_images(images, 4)), alone)


def test_packed_images_hold_pixels_and_coordinates():
    batch = pack_images(make_images(), 4)
    assert batch.grids == ((3, 5), (1, 1), (7, 3), (3, 5))
    assert batch.offsets.starts.tolist() == [0, 15, 16, 37, 52]
    assert (batch.offsets.total, batch.offsets.max_len, len(batch)) == (52, 21, 4)
    for image, grid, start in zip(make_images(), batch.grids, batch.offsets.starts.tolist()):
        count = grid[0] * grid[1]
        assert torch.equal(batch.pixels[start : start + count], split_patches(image[None], 4)[0])
        coordinates, sizes = patch_coordinates(grid)
        assert torch.equal(batch.coordinates[start : start + count], coordinates)
        assert torch.equal(batch.sizes[start : start + count], sizes)


def test_packed_images_move_to_a_device():
    batch = pack_images(make_images(), 4).to("meta")
    assert isinstance(batch, PackedImages)
    assert {x.device.type for x in (batch.pixels, batch.coordinates, batch.sizes, batch.offsets.starts)} == {"meta"}
    assert (batch.offsets.total, batch.grids[2]) == (52, (7, 3))


def test_prefix_is_prepended_and_removed():
    offsets = Offsets.from_starts(torch.tensor([0, 2, 2, 5]))
    prefix, x = torch.randn(2, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    y, extended = prepend_prefix(prefix, x, offsets)
    expected = torch.cat([prefix, x[:2], prefix, prefix, x[2:]])
    assert torch.equal(y, expected)
    assert extended.starts.tolist() == [0, 4, 6, 11] == extend_offsets(offsets, 2).starts.tolist()
    assert (extended.total, extended.max_len) == (11, 5)
    assert torch.equal(remove_prefix(y, 2, offsets), x)
    assert torch.equal(first_tokens(y, extended, 2), prefix.repeat(3, 1))
    weights = torch.randn(11, 4)
    grads = torch.autograd.grad((y * weights).sum(), (prefix, x))
    expected_grads = torch.autograd.grad((expected * weights).sum(), (prefix, x))
    for grad, expected_grad in zip(grads, expected_grads):
        torch.testing.assert_close(grad, expected_grad)
    batch, no_offsets = prepend_prefix(prefix, x.view(1, 5, 4), None)
    assert no_offsets is None
    assert torch.equal(batch[0], torch.cat([prefix, x]))
    assert torch.equal(remove_prefix(batch, 2, None)[0], x)


def test_gather_rows_selects_per_sequence():
    x = torch.randn(2, 5, 3)
    indices = torch.tensor([[4, 0], [1, 1]])
    assert torch.equal(gather_rows(x, indices), torch.stack([x[0, [4, 0]], x[1, [1, 1]]]))


# -- positions of patches ----------------------------------------------------------------------------------------------


def test_sinusoidal_grid_concatenates_row_and_column():
    coordinates, _ = patch_coordinates((5, 7))
    encode = Sinusoidal(8, split_halves=True)
    expected = torch.cat((encode(coordinates[:, 0].long()), encode(coordinates[:, 1].long())), dim=1)
    torch.testing.assert_close(SinusoidalGrid(16)(coordinates), expected)
    with pytest.raises(RegardError, match=r"multiple of 4 \(got 10\)"):
        SinusoidalGrid(10)


@pytest.mark.parametrize("grid", [(3, 5), (6, 10), (2, 9), (1, 1), (14, 3)])
def test_learned_positions_are_interpolated_like_torch(grid):
    """The formula of interpolate_pos_encoding in transformers: bicubic, without aligned corners."""
    table = LearnedGrid(6, (3, 5), prefix=2)
    expected = table.weight[2:].view(1, 3, 5, 6).permute(0, 3, 1, 2)
    expected = nn.functional.interpolate(expected, size=grid, mode="bicubic", align_corners=False)
    expected = expected.permute(0, 2, 3, 1).flatten(0, 2)
    output = table(*patch_coordinates(grid))
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(output)
    torch.testing.assert_close(
        torch.autograd.grad((output * weights).sum(), table.weight)[0],
        torch.autograd.grad((expected * weights).sum(), table.weight)[0],
    )


def test_interpolation_weights_sum_to_one():
    for size in (1, 3, 8, 20):
        weights = bicubic_weights(torch.arange(size), torch.full((size,), size), 5)
        torch.testing.assert_close(weights.sum(1), torch.ones(size))


def test_rotary_grid_dot_products_depend_only_on_row_and_column_distance():
    rotary, q, k = RotaryGrid(8), torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def product(p: tuple[int, int], s: tuple[int, int]) -> torch.Tensor:
        a, b = (apply_rotary(x, *rotary(torch.tensor([position]))) for x, position in ((q, p), (k, s)))
        return (a * b).sum()

    torch.testing.assert_close(product((7, 2), (3, 5)), product((9, 4), (5, 7)))
    assert not torch.isclose(product((7, 2), (3, 5)), product((7, 2), (3, 6)))
    assert not torch.isclose(product((7, 2), (3, 5)), product((7, 2), (4, 5)))
    torch.testing.assert_close(product((0, 0), (0, 0)), (q * k).sum())
    with pytest.raises(RegardError, match=r"multiple of 4 \(got 6\)"):
        RotaryGrid(6)


# -- image embedding ---------------------------------------------------------------------------------------------------


def embedding(**changes) -> ImageEmbedding:
    torch.manual_seed(0)
    sizes = dict(patch=4, grid=(3, 5), prefix=2, head_width=8)
    return ImageEmbedding(3, 16, **(sizes | changes))


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
def test_packed_and_single_images_agree(positions, prefix):
    embed = embedding(positions=positions, prefix=prefix)
    x, offsets, tables = embed(pack_images(make_images(), 4))
    alone = [embed(image[None]) for image in make_images()]
    torch.testing.assert_close(x, torch.cat([one.x[0] for one in alone]))
    assert offsets.lengths.tolist() == [15 + prefix, 1 + prefix, 21 + prefix, 15 + prefix]
    if positions == "rotary":
        for i in range(2):
            torch.testing.assert_close(tables[i], torch.cat([one.rotary[i] for one in alone]))
    else:
        assert tables is None


def test_prefix_tokens_with_and_without_positions():
    with_rows, without = embedding(), embedding(prefix_positions=False)
    image = torch.rand(1, 3, 12, 20)
    assert with_rows.learned.weight.shape == (17, 16)
    assert without.learned.weight.shape == (15, 16)
    torch.testing.assert_close(with_rows(image).x[0, :2], with_rows.prefix + with_rows.learned.weight[:2])
    torch.testing.assert_close(without(image).x[0, :2], without.prefix)


def test_pixels_are_normalized_once_per_channel():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    embed = embedding(mean=mean, std=std)
    image = torch.rand(1, 3, 12, 20)
    expected = torch.stack([(image[0, c] - mean[c]) / std[c] for c in range(3)])[None]
    torch.testing.assert_close(embed.normalize(image), expected)
    packed = embed.normalize(pack_images([image[0]], 4))
    torch.testing.assert_close(packed.pixels, split_patches(expected, 4)[0])
    torch.testing.assert_close(embed(image).x[0, 2:], embed.patches(expected)[0] + embed.learned.weight[2:])


def test_wrong_number_of_channels_raises():
    # Means of three channels would silently broadcast one channel to three.
    embed = embedding(mean=(0.1, 0.2, 0.3))
    with pytest.raises(RegardError, match="Images of 1 channels are not supported: the model expects 3"):
        embed(torch.rand(1, 1, 12, 20))
    with pytest.raises(RegardError, match="Patches have 16 values; the model expects 48"):
        embed(pack_images([torch.rand(1, 12, 20)], 4))


@pytest.mark.parametrize("kind", ["linear", "convolution", "stem"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_visible_patches_match_the_full_image(kind, positions):
    embed = embedding(kind=kind, positions=positions)
    image = torch.rand(2, 3, 12, 20)
    indices = torch.stack([torch.randperm(15), torch.randperm(15)])
    full, visible = embed(image), embed.embed_visible(embed.normalize(image), indices)
    torch.testing.assert_close(visible.x[:, 2:], gather_rows(full.x[:, 2:], indices))
    torch.testing.assert_close(visible.x[:, :2], full.x[:, :2])
    if positions == "rotary":
        assert torch.equal(visible.rotary[0][1, 5], full.rotary[0][2 + indices[1, 3]])


def test_stem_does_not_see_masked_patches():
    embed, visible = embedding(kind="stem"), torch.tensor([[0, 3, 7]])
    image = torch.rand(1, 3, 12, 20)
    pixels = embed.normalize(image)
    patches = split_patches(pixels, 4)
    masked = [i for i in range(15) if i not in visible[0].tolist()]
    patches[:, masked] = torch.rand(1, 12, 48)
    other = join_patches(patches, (3, 5), 4)
    torch.testing.assert_close(embed.embed_visible(pixels, visible).x, embed.embed_visible(other, visible).x)


# -- blocks over (B, T, E) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, causal()])
def test_sequences_of_one_length_need_no_offsets(mask):
    torch.manual_seed(0)
    norms = {"query_norm": nn.LayerNorm(4), "key_norm": nn.LayerNorm(4)}
    attention, x = MultiHeadAttention(16, heads=4, mask=mask, **norms), torch.randn(3, 5, 16)
    packed = attention(x.flatten(0, 1), Offsets.from_starts(torch.arange(4) * 5))
    torch.testing.assert_close(attention(x), packed.view(3, 5, 16))


def test_not_qkv_bias_placement():
    block = BlockConfig(16, 4, 32, bias="not_qkv").make_block("scaled_dot")
    linear = {name for name, module in block.named_modules() if getattr(module, "bias", None) is not None}
    assert {name for name in linear if "norm" not in name} == {
        "attention.out",
        "feedforward.fc1",
        "feedforward.fc2",
    }


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("packed", [False, True])
def test_forward_first_matches_forward(norm, packed):
    torch.manual_seed(0)
    block = BlockConfig(16, 4, 32, dropout=0.0, norm=norm, layer_scale=0.3).make_block("scaled_dot")
    x, offsets = torch.randn(3, 6, 16), Offsets.from_starts(torch.arange(4) * 6)
    coordinates = nn.functional.pad(patch_coordinates((2, 2))[0], (0, 0, 2, 0))
    tables = RotaryGrid(4)(coordinates)
    full = block(x, None, rotary=tables)
    if packed:
        first = block.forward_first(x.flatten(0, 1), offsets, 2, tuple(table.repeat(3, 1, 1) for table in tables))
    else:
        first = block.forward_first(x, None, 2, tables)
    torch.testing.assert_close(first, full[:, :2])


def test_layer_scale_multiplies_the_update():
    residual = Residual(8, dropout=0.0, layer_scale=0.25)
    torch.testing.assert_close(residual(torch.ones(3, 8)), torch.full((3, 8), 0.25))
    assert residual.layer_scale.requires_grad
    assert Residual(8, dropout=0.0).layer_scale is None


def test_drop_path_keeps_the_mean_and_drops_entire_sequences():
    torch.manual_seed(0)
    x = torch.ones(4000, 3, 2)
    y = DropPath(0.3)(x)
    values = y.flatten(1).unique(dim=1)
    assert values.shape[1] == 1  # one value per sequence
    assert (values == 0).float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert y.mean().item() == pytest.approx(1.0, abs=0.04)
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert torch.equal(DropPath(0.3).eval()(x), x)


def test_drop_path_of_packed_sequences_draws_the_same_mask():
    x, offsets = torch.randn(6, 5, 2), Offsets.from_starts(torch.arange(7) * 5)
    layer = DropPath(0.5)
    torch.manual_seed(3)
    padded = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x.flatten(0, 1), offsets), padded.flatten(0, 1))
    assert not torch.equal(layer(x), padded)  # a new draw


# -- heads over tokens -------------------------------------------------------------------------------------------------


def test_heads_on_packed_images_match_single_images():
    torch.manual_seed(0)
    config = BlockConfig(16, 4, 32, dropout=0.0)
    lengths = [15, 1, 21]
    parts = [torch.randn(n, 16) for n in lengths]
    offsets = Offsets.from_starts(torch.tensor([0, 15, 16, 37]))
    for layer in (AttentionPooling(config, "scaled_dot"), SegmentationDecoder(3, config, "scaled_dot", 2)):
        alone = [layer(part[None], None)[0] for part in parts]
        packed = layer(torch.cat(parts), offsets)
        torch.testing.assert_close(packed, torch.stack(alone) if packed.shape[0] == 3 else torch.cat(alone))


def test_segmentation_logits_are_products_of_patches_and_queries():
    """Without blocks, the logits are the scaled products of patches and queries."""
    layer = SegmentationDecoder(2, BlockConfig(4, 1, 8), "scaled_dot", layers=0)
    layer.norm = nn.Identity()
    with torch.no_grad():
        for projection in (layer.of_patch, layer.of_query):
            projection.weight.copy_(torch.eye(4))
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(layer(x, None), x @ layer.queries.T / math.sqrt(4))
