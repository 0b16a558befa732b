"""Images to tokens: cutting and projecting, batches of many sizes, positions in a grid, drop-path and LayerScale."""

import math

import pytest
import torch
from torch import nn

from regard.attention import Offsets
from regard.errors import RegardError
from regard.layers.blocks import BlockConfig, EncoderBlock, first_tokens
from regard.layers.dropout import DropPath
from regard.layers.embeddings import ImageEmbedding
from regard.layers.heads import ClassQueries, QueryPool
from regard.layers.multihead import MultiHead
from regard.layers.patches import (
    PackedImages,
    Patches,
    cut,
    joined,
    pack_images,
    put_before,
    rows_of,
    take_away,
    whereabouts,
    widened,
)
from regard.layers.positions import LearnedGrid, RotaryGrid, Sinusoidal, SinusoidalGrid, apply_rotary, cubic
from regard.layers.residual import Residual

# Odd counts of patches, and grids that are no squares.
SIZES = [(12, 20), (4, 4), (28, 12), (12, 20)]


def pictures(channels: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.rand(channels, *size) for size in SIZES]


# -- cutting and projecting --------------------------------------------------------------------------------------------


def test_a_patch_is_what_it_was_in_the_image():
    image = torch.rand(2, 3, 12, 20)
    patches = cut(image, 4)
    assert patches.shape == (2, 15, 48)
    for number, (row, column) in enumerate(whereabouts((3, 5))[0].tolist()):
        square = image[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        assert torch.equal(patches[:, number], square.flatten(1))
    assert torch.equal(joined(patches, (3, 5), 4), image)


@pytest.mark.parametrize("patch", [1, 3, 4])
def test_linear_and_convolution_are_one_map(patch):
    linear, convolution = Patches(3, 16, patch), Patches(3, 16, patch, "convolution")
    with torch.no_grad():
        convolution.project.weight.copy_(linear.project.weight.view(16, 3, patch, patch))
        convolution.project.bias.copy_(linear.project.bias)
    image = torch.rand(2, 3, 12, 24)
    torch.testing.assert_close(linear(image), convolution(image))
    packed = pack_images(list(image), patch)
    torch.testing.assert_close(linear(packed), convolution(packed))
    torch.testing.assert_close(linear(packed), linear(image).flatten(0, 1))


@pytest.mark.parametrize("kind", ["linear", "convolution", "stem"])
def test_packed_images_are_projected_one_by_one(kind):
    patches = Patches(1, 16, 4, kind)
    alone = [patches(image[None])[0] for image in pictures(1)]
    torch.testing.assert_close(patches(pack_images(pictures(1), 4)), torch.cat(alone))


def test_a_stem_sees_beyond_the_border_of_a_patch_and_the_others_do_not():
    image = torch.rand(1, 3, 12, 12)
    other = image.clone()
    other[:, :, 3, 3] += 1  # the last pixel of the first patch
    for kind, changed in (("linear", 1), ("stem", 9)):
        patches = Patches(3, 16, 4, kind)
        differing = (patches(image) - patches(other)).abs().amax(-1) > 1e-6
        assert differing.sum() == changed
    with pytest.raises(RegardError, match="cannot make patches of 6×6"):
        Patches(3, 16, 6, "stem")


@pytest.mark.parametrize("kind", ["linear", "convolution", "stem"])
def test_sides_that_are_no_whole_patches_are_refused(kind):
    with pytest.raises(RegardError, match=r"14×20 pixels does not divide into patches of 4×4\. .* multiples of 4"):
        Patches(3, 16, 4, kind)(torch.rand(1, 3, 14, 20))
    with pytest.raises(RegardError, match="20×14"):
        pack_images([torch.rand(3, 20, 14)], 4)
    with pytest.raises(RegardError, match="0×0 pixels has none"):
        pack_images([torch.rand(3, 20, 14)], 0)


# -- batches of many sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "convolution", "stem"])
def test_tokens_of_packed_images_are_those_of_each_alone(kind):
    images = [torch.rand(3, *size) for size in ((12, 8), (12, 8), (4, 16), (12, 8))]  # of one size together, and apart
    patches = Patches(3, 16, 4, kind)
    alone = torch.cat([patches(image[None])[0] for image in images])
    torch.testing.assert_close(patches(pack_images(images, 4)), alone)


def test_packed_images_know_where_each_patch_was():
    batch = pack_images(pictures(), 4)
    assert batch.grids == ((3, 5), (1, 1), (7, 3), (3, 5))
    assert batch.offsets.starts.tolist() == [0, 15, 16, 37, 52]
    assert (batch.offsets.total, batch.offsets.max_len, len(batch)) == (52, 21, 4)
    for image, grid, start in zip(pictures(), batch.grids, batch.offsets.starts.tolist()):
        count = grid[0] * grid[1]
        assert torch.equal(batch.pixels[start : start + count], cut(image[None], 4)[0])
        places, sizes = whereabouts(grid)
        assert torch.equal(batch.places[start : start + count], places)
        assert torch.equal(batch.sizes[start : start + count], sizes)


def test_packed_images_move():
    batch = pack_images(pictures(), 4).to("meta")
    assert isinstance(batch, PackedImages)
    assert {x.device.type for x in (batch.pixels, batch.places, batch.sizes, batch.offsets.starts)} == {"meta"}
    assert (batch.offsets.total, batch.grids[2]) == (52, (7, 3))


def test_rows_are_put_before_each_sequence_and_taken_away_again():
    offsets = Offsets.of(torch.tensor([0, 2, 2, 5]))
    first, x = torch.randn(2, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    y, wide = put_before(first, x, offsets)
    expected = torch.cat([first, x[:2], first, first, x[2:]])
    assert torch.equal(y, expected)
    assert wide.starts.tolist() == [0, 4, 6, 11] == widened(offsets, 2).starts.tolist()
    assert (wide.total, wide.max_len) == (11, 5)
    assert torch.equal(take_away(y, 2, offsets), x)
    assert torch.equal(first_tokens(y, wide, 2), first.repeat(3, 1))
    weights = torch.randn(11, 4)
    ours = torch.autograd.grad((y * weights).sum(), (first, x))
    theirs = torch.autograd.grad((expected * weights).sum(), (first, x))
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other)
    square, none = put_before(first, x.view(1, 5, 4), None)
    assert none is None
    assert torch.equal(square[0], torch.cat([first, x]))
    assert torch.equal(take_away(square, 2, None)[0], x)


def test_rows_are_chosen_for_each_sequence():
    x = torch.randn(2, 5, 3)
    chosen = torch.tensor([[4, 0], [1, 1]])
    assert torch.equal(rows_of(x, chosen), torch.stack([x[0, [4, 0]], x[1, [1, 1]]]))


# -- positions in a grid -----------------------------------------------------------------------------------------------


def test_sinusoids_of_row_and_column_side_by_side():
    places, _ = whereabouts((5, 7))
    line = Sinusoidal(8, halves=True)
    expected = torch.cat((line(places[:, 0].long()), line(places[:, 1].long())), dim=1)
    torch.testing.assert_close(SinusoidalGrid(16)(places), expected)
    with pytest.raises(RegardError, match="multiple of 4, not 10"):
        SinusoidalGrid(10)


@pytest.mark.parametrize("grid", [(3, 5), (6, 10), (2, 9), (1, 1), (14, 3)])
def test_learned_positions_are_interpolated_as_torch_does_it(grid):
    """The formula of Hugging Face's interpolate_pos_encoding: bicubic over the patches' rows, without corners."""
    table = LearnedGrid(6, (3, 5), prefix=2)
    theirs = table.weight[2:].view(1, 3, 5, 6).permute(0, 3, 1, 2)
    theirs = nn.functional.interpolate(theirs, size=grid, mode="bicubic", align_corners=False)
    theirs = theirs.permute(0, 2, 3, 1).flatten(0, 2)
    ours = table(*whereabouts(grid))
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad((ours * weights).sum(), table.weight)[0],
        torch.autograd.grad((theirs * weights).sum(), table.weight)[0],
    )


def test_shares_of_interpolation_sum_to_one():
    for size in (1, 3, 8, 20):
        shares = cubic(torch.arange(size), torch.full((size,), size), 5)
        torch.testing.assert_close(shares.sum(1), torch.ones(size))


def test_rotated_dot_products_know_distances_of_rows_and_columns_alone():
    rotary, q, k = RotaryGrid(8), torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def product(p: tuple[int, int], s: tuple[int, int]) -> torch.Tensor:
        a, b = (apply_rotary(x, *rotary(torch.tensor([place]))) for x, place in ((q, p), (k, s)))
        return (a * b).sum()

    torch.testing.assert_close(product((7, 2), (3, 5)), product((9, 4), (5, 7)))
    assert not torch.isclose(product((7, 2), (3, 5)), product((7, 2), (3, 6)))
    assert not torch.isclose(product((7, 2), (3, 5)), product((7, 2), (4, 5)))
    torch.testing.assert_close(product((0, 0), (0, 0)), (q * k).sum())
    with pytest.raises(RegardError, match="multiple of 4, not 6"):
        RotaryGrid(6)


# -- the embedding -----------------------------------------------------------------------------------------------------


def embedding(**changes) -> ImageEmbedding:
    torch.manual_seed(0)
    sizes = dict(patch=4, grid=(3, 5), prefix=2, head_width=8)
    return ImageEmbedding(3, 16, **(sizes | changes))


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
def test_one_size_packed_and_one_by_one_agree(positions, prefix):
    embed = embedding(positions=positions, prefix=prefix)
    x, offsets, tables = embed(pack_images(pictures(), 4))
    alone = [embed(image[None]) for image in pictures()]
    torch.testing.assert_close(x, torch.cat([one.x[0] for one in alone]))
    assert offsets.lengths.tolist() == [15 + prefix, 1 + prefix, 21 + prefix, 15 + prefix]
    if positions == "rotary":
        for i in range(2):
            torch.testing.assert_close(tables[i], torch.cat([one.rotary[i] for one in alone]))
    else:
        assert tables is None


def test_the_first_tokens_have_positions_of_their_own_or_none():
    with_rows, without = embedding(), embedding(prefix_positions=False)
    image = torch.rand(1, 3, 12, 20)
    assert with_rows.learned.weight.shape == (17, 16)
    assert without.learned.weight.shape == (15, 16)
    torch.testing.assert_close(with_rows(image).x[0, :2], with_rows.prefix + with_rows.learned.weight[:2])
    torch.testing.assert_close(without(image).x[0, :2], without.prefix)


def test_pixels_are_normed_once_by_channel():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    embed = embedding(mean=mean, std=std)
    image = torch.rand(1, 3, 12, 20)
    by_hand = torch.stack([(image[0, c] - mean[c]) / std[c] for c in range(3)])[None]
    torch.testing.assert_close(embed.normalised(image), by_hand)
    packed = embed.normalised(pack_images([image[0]], 4))
    torch.testing.assert_close(packed.pixels, cut(by_hand, 4)[0])
    torch.testing.assert_close(embed(image).x[0, 2:], embed.patches(by_hand)[0] + embed.learned.weight[2:])


def test_images_of_other_channels_are_refused():
    # One mean for each of three channels would make three of one without a word.
    embed = embedding(mean=(0.1, 0.2, 0.3))
    with pytest.raises(RegardError, match="Images of 1 channels, where the model's have 3"):
        embed(torch.rand(1, 1, 12, 20))
    with pytest.raises(RegardError, match="Patches of 16 numbers, where the model's have 48"):
        embed(pack_images([torch.rand(1, 12, 20)], 4))


@pytest.mark.parametrize("kind", ["linear", "convolution", "stem"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_few_patches_are_those_of_the_whole_image(kind, positions):
    embed = embedding(kind=kind, positions=positions)
    image = torch.rand(2, 3, 12, 20)
    everything = torch.stack([torch.randperm(15), torch.randperm(15)])
    whole, few = embed(image), embed.shown(embed.normalised(image), everything)
    torch.testing.assert_close(few.x[:, 2:], rows_of(whole.x[:, 2:], everything))
    torch.testing.assert_close(few.x[:, :2], whole.x[:, :2])
    if positions == "rotary":
        assert torch.equal(few.rotary[0][1, 5], whole.rotary[0][2 + everything[1, 3]])


def test_a_stem_is_not_shown_what_is_hidden():
    embed, shown = embedding(kind="stem"), torch.tensor([[0, 3, 7]])
    image = torch.rand(1, 3, 12, 20)
    pixels = embed.normalised(image)
    patches = cut(pixels, 4)
    hidden = [i for i in range(15) if i not in shown[0].tolist()]
    patches[:, hidden] = torch.rand(1, 12, 48)
    other = joined(patches, (3, 5), 4)
    torch.testing.assert_close(embed.shown(pixels, shown).x, embed.shown(other, shown).x)


# -- blocks over rectangles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["self", "masked"])
def test_sequences_of_one_length_need_no_offsets(kind):
    torch.manual_seed(0)
    attention, x = MultiHead(16, heads=4, kind=kind, qk_norm_eps=1e-5, qk_norm_kind="layer"), torch.randn(3, 5, 16)
    packed = attention(x.flatten(0, 1), Offsets.of(torch.arange(4) * 5))
    torch.testing.assert_close(attention(x), packed.view(3, 5, 16))


def test_biases_are_where_their_name_says():
    block = EncoderBlock(BlockConfig(16, 4, 32, bias="not_qkv"), "scaled_dot")
    linear = {name for name, module in block.named_modules() if getattr(module, "bias", None) is not None}
    assert {name for name in linear if "norm" not in name} == {
        "attention.out",
        "feedforward.inner",
        "feedforward.outer",
    }


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_first_tokens_alone_are_those_of_all(norm, packed):
    torch.manual_seed(0)
    block = EncoderBlock(BlockConfig(16, 4, 32, dropout=0.0, norm=norm, layer_scale=0.3), "scaled_dot")
    x, offsets = torch.randn(3, 6, 16), Offsets.of(torch.arange(4) * 6)
    places = nn.functional.pad(whereabouts((2, 2))[0], (0, 0, 2, 0))
    tables = RotaryGrid(4)(places)
    whole = block(x, None, rotary=tables)
    if packed:
        few = block.forward_first(x.flatten(0, 1), offsets, 2, tuple(one.repeat(3, 1, 1) for one in tables))
    else:
        few = block.forward_first(x, None, 2, tables)
    torch.testing.assert_close(few, whole[:, :2])


def test_layer_scale_multiplies_what_is_added():
    residual = Residual(8, dropout=0.0, layer_scale=0.25)
    x = torch.randn(3, 8)
    torch.testing.assert_close(residual(x, torch.ones(3, 8)), x + 0.25)
    assert residual.layer_scale.requires_grad
    assert Residual(8, dropout=0.0).layer_scale is None


def test_drop_path_keeps_the_mean_and_drops_whole_sequences():
    torch.manual_seed(0)
    x = torch.ones(4000, 3, 2)
    y = DropPath(0.3)(x)
    alone = y.flatten(1).unique(dim=1)
    assert alone.shape[1] == 1  # all or nothing of each sequence
    assert (alone == 0).float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert y.mean().item() == pytest.approx(1.0, abs=0.04)
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert torch.equal(DropPath(0.3).eval()(x), x)


def test_drop_path_draws_alike_for_packed_sequences():
    x, offsets = torch.randn(6, 5, 2), Offsets.of(torch.arange(7) * 5)
    layer = DropPath(0.5)
    torch.manual_seed(3)
    square = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x.flatten(0, 1), offsets), square.flatten(0, 1))
    assert not torch.equal(layer(x), square)  # another draw, another choice


# -- readouts ----------------------------------------------------------------------------------------------------------


def test_a_question_and_class_queries_read_packed_images_as_they_read_one():
    torch.manual_seed(0)
    config = BlockConfig(16, 4, 32, dropout=0.0)
    lengths = [15, 1, 21]
    parts = [torch.randn(n, 16) for n in lengths]
    offsets = Offsets.of(torch.tensor([0, 15, 16, 37]))
    for layer in (QueryPool(config, "scaled_dot"), ClassQueries(3, config, "scaled_dot", 2)):
        alone = [layer(part[None], None)[0] for part in parts]
        together = layer(torch.cat(parts), offsets)
        torch.testing.assert_close(together, torch.stack(alone) if together.shape[0] == 3 else torch.cat(alone))


def test_a_label_is_where_its_query_points():
    """With blocks that do nothing, the mask is the product of patch and query."""
    layer = ClassQueries(2, BlockConfig(4, 1, 8), "scaled_dot", layers=0)
    layer.norm = nn.Identity()
    with torch.no_grad():
        for one in (layer.of_patch, layer.of_query):
            one.weight.copy_(torch.eye(4))
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(layer(x, None), x @ layer.queries.T / math.sqrt(4))
