"""A model of images: labels and masks, each against a plain twin; its folder has no tokenisers."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.data import read_images
from regard.errors import RegardError
from regard.folder import ImageModel, TextEncoder, load, pictures, save
from regard.models.vit import ViT, vit_pico

LABELS = ("cat", "dog", "owl")


def model_of(head: str = "classify", **changes) -> ImageModel:
    torch.manual_seed(0)
    sizes: dict = dict(width=16, heads=2, layers=2, feedforward=32, patch=4, image_height=12, image_width=16)
    sizes |= dict(head=head, labels=LABELS, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25), drop_path=0.5)
    model = ViT(vit_pico(**(sizes | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 5  # opinions
    return ImageModel(model, {"step": 3})


def pixels(*sizes: tuple[int, int]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    small = [Image.fromarray(random.integers(0, 256, (3, 4, 3), np.uint8)) for _ in sizes]
    return [np.asarray(one.resize(size[::-1], Image.Resampling.BILINEAR)) for one, size in zip(small, sizes)]


def logits_of(model: ImageModel, image: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return model.model(torch.from_numpy(image.transpose(2, 0, 1)[None] / np.float32(255)))[0]


# Labels


def test_probabilities_are_those_of_the_model():
    model, images = model_of(), pixels((12, 16), (12, 16), (12, 16))
    found = model.classify(images)
    for image, one in zip(images, found):
        shares = dict(zip(LABELS, logits_of(model, image).softmax(0).tolist()))
        assert one.probabilities == pytest.approx(shares, abs=1e-5)
        assert one.label == max(shares, key=lambda label: shares[label])
        assert one.probability == one.probabilities[one.label]
    assert np.abs(np.diff([list(one.probabilities.values()) for one in found], axis=0)).max() > 0.01


def test_files_open_pictures_arrays_and_sets_are_one(tmp_path):
    model, images = model_of(), pixels((30, 40), (21, 28))
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    files = [tmp_path / f"{number}.png" for number in range(2)]
    found = model.classify(images)
    assert found == model.classify(files) == model.classify([str(file) for file in files])
    assert found == model.classify([Image.fromarray(image) for image in images])
    read = read_images(files, size=(12, 16))
    assert found == model.classify(read)  # resized as in training
    np.testing.assert_array_equal(
        model.probabilities(read.pixels), np.array([list(one.probabilities.values()) for one in found], np.float32)
    )


def test_grey_transparent_and_turned_pictures():
    model = model_of()
    [image] = pixels((12, 16))
    grey = Image.fromarray(image).convert("L")
    as_colour = np.repeat(np.asarray(grey)[..., None], 3, axis=2)
    assert model.classify([grey, np.asarray(grey), np.asarray(grey)[..., None]]) == model.classify([as_colour] * 3)
    clear = np.concatenate((image, np.zeros((12, 16, 1), np.uint8)), axis=2)
    assert model.classify([clear]) == model.classify([np.full((12, 16, 3), 255, np.uint8)])
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(image)))
    turned.getexif()[0x0112] = 6  # as a camera says that it lay on its side
    assert model.classify([turned]) == model.classify([image])
    one = model_of(channels=1, mean=(0.5,), std=(0.5,))
    assert one.classify([grey]) == one.classify([as_colour])


def test_batches_do_not_matter(monkeypatch):
    model, images = model_of(), pixels(*[(12, 16)] * 5)
    whole = model.classify(images)
    monkeypatch.setattr(pictures, "BATCH_TOKENS", 25)  # two at a time
    for one, other in zip(whole, model.classify(images)):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)
    assert model.classify([]) == []
    assert model.probabilities(np.zeros((0, 12, 16, 3), np.uint8)).shape == (0, 3)


def test_what_is_random_in_training_is_off():
    model, images = model_of(), pixels((12, 16))
    before = model.classify(images)
    model.model.train()
    assert model.classify(images) == before


# Masks


@pytest.mark.parametrize("segmenter", ["linear", "queries"])
def test_masks_have_the_pictures_own_size(segmenter):
    model = model_of("segment", segmenter=segmenter)
    images = pixels((12, 16), (12, 16), (24, 32), (20, 50), (7, 5))
    found = model.segment(images)
    assert [one.shape for one in found] == [image.shape[:2] for image in images]
    assert all(one.dtype == np.uint8 for one in found)
    for image, mask in zip(images[:2], found):
        np.testing.assert_array_equal(mask, logits_of(model, image).argmax(0))
    assert len(np.unique(found[0])) > 1
    half = np.asarray(Image.fromarray(images[2]).resize((16, 12), Image.Resampling.BICUBIC))
    wide = torch.nn.functional.interpolate(logits_of(model, half)[None], (24, 32), mode="bilinear")[0]
    np.testing.assert_array_equal(found[2], wide.argmax(0))
    # All of a wide picture, at the height of training: 12 rows, and 30 columns rounded to whole patches.
    wide_one = np.asarray(Image.fromarray(images[3]).resize((32, 12), Image.Resampling.BICUBIC))
    wide = torch.nn.functional.interpolate(logits_of(model, wide_one)[None], (20, 50), mode="bilinear")[0]
    np.testing.assert_array_equal(found[3], wide.argmax(0))


# What cannot be


def test_what_was_not_trained_for():
    with pytest.raises(RegardError, match=r"not trained to classify\. .* --task classify-images"):
        model_of("segment").classify(pixels((12, 16)))
    with pytest.raises(RegardError, match=r"not trained to segment\. .* --task segment"):
        model_of().segment(pixels((12, 16)))
    with pytest.raises(RegardError, match="not trained to classify"):
        model_of(labels=()).classify(pixels((12, 16)))


def test_bad_pictures_are_named(tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    for picture, says in (
        (tmp_path / "bad.jpg", f"{tmp_path / 'bad.jpg'}: not a readable image"),
        (tmp_path / "no.jpg", f"{tmp_path / 'no.jpg'}: there is no such file."),
        (np.zeros((4, 4), np.float32), "picture 2: an array of float32 and shape (4, 4) is not a picture."),
        (np.zeros((4, 4, 5), np.uint8), "picture 2: an array of uint8 and shape (4, 4, 5) is not a picture."),
    ):
        with pytest.raises(RegardError) as caught:
            model_of().classify([*pixels((12, 16)), picture])
        assert str(caught.value).startswith(says)


# The folder


@pytest.mark.parametrize("head", ["none", "classify", "segment", "pixels"])
def test_what_is_loaded_is_what_was_saved(tmp_path, head):
    model, images = model_of(head), pixels((12, 16), (30, 20))
    (tmp_path / "tokenizer.json").write_text("of another model that was here before")
    regard.save(tmp_path, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "training.json"]
    again = load(tmp_path, "cpu", expect=ImageModel)
    assert (again.training, again.model.config, again.tokenizers) == ({"step": 3}, model.model.config, ())
    if head == "classify":
        assert again.classify(images) == model.classify(images)
    if head == "segment":
        for one, other in zip(again.segment(images), model.segment(images)):
            np.testing.assert_array_equal(one, other)


def test_means_that_are_no_numbers_are_refused(tmp_path):
    model_of().save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mean"] == [0.4, 0.5, 0.6]
    assert "shared_tokenizer" not in config
    assert "special" not in config
    (tmp_path / "config.json").write_text(json.dumps(config | {"mean": ["0.4"]}))
    with pytest.raises(RegardError, match=r"mean\[0\] must be a number \(got '0.4'\)"):
        load(tmp_path, "cpu")


def test_a_model_of_images_is_not_an_encoder_of_texts(tmp_path):
    save(tmp_path, model_of())
    with pytest.raises(RegardError, match="holds a model of images, not an encoder of texts"):
        load(tmp_path, "cpu", expect=TextEncoder)


# What a model sees, and the numbers in its masks


def test_a_picture_as_the_model_sees_it():
    image = pixels((24, 64))[0]
    for head, seen in (("classify", (12, 16)), ("segment", (12, 32)), ("none", (12, 16))):
        model = model_of(head)
        found = model.seen(image)
        assert found.shape == (*seen, 3)
        middle = np.asarray(Image.fromarray(image).resize((32, 12), Image.Resampling.BICUBIC))
        cut = (32 - seen[1]) // 2
        np.testing.assert_allclose(found.astype(int), middle[:, cut : 32 - cut].astype(int), atol=3)


@pytest.mark.parametrize(
    ("labels", "values"),
    [
        (("1", "2", "3"), (1, 2, 3)),
        (("0", "254"), (0, 254)),
        (("cat", "2"), (0, 1)),
        (("0", "255"), (0, 1)),  # 255 is nothing
        (("01", "2"), (0, 1)),  # no number that a mask holds
        (LABELS, (0, 1, 2)),
    ],
)
def test_labels_that_are_numbers_are_those_of_the_masks(labels, values):
    assert model_of("segment", labels=labels).mask_values == values
