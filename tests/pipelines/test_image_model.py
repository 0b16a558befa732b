"""Image pipeline: labels and masks, compared with the model itself; its folder has no tokenizers."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.data import read_images
from regard.errors import RegardError
from regard.models.vit import ViT, vit_pico
from regard.pipelines import ImageModel, TextEncoder, image_model, load, save

LABELS = ("cat", "dog", "owl")


def make_image_model(head: str = "classify", **changes) -> ImageModel:
    torch.manual_seed(0)
    sizes: dict = dict(width=16, heads=2, layers=2, feedforward=32, patch=4, image_height=12, image_width=16)
    sizes |= dict(head=head, labels=LABELS, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25), drop_path=0.5)
    model = ViT(vit_pico(**(sizes | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 5  # peaked distributions
    return ImageModel(model, {"step": 3})


def pixels(*sizes: tuple[int, int]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    small = [Image.fromarray(random.integers(0, 256, (3, 4, 3), np.uint8)) for _ in sizes]
    return [np.asarray(one.resize(size[::-1], Image.Resampling.BILINEAR)) for one, size in zip(small, sizes)]


def model_logits(model: ImageModel, image: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return model.model(torch.from_numpy(image.transpose(2, 0, 1)[None] / np.float32(255)))[0]


# Labels


def test_probabilities_match_the_model():
    model, images = make_image_model(), pixels((12, 16), (12, 16), (12, 16))
    results = model.classify(images)
    for image, result in zip(images, results):
        probabilities = dict(zip(LABELS, model_logits(model, image).softmax(0).tolist()))
        assert result.probabilities == pytest.approx(probabilities, abs=1e-5)
        assert result.label == max(probabilities, key=lambda label: probabilities[label])
        assert result.probability == result.probabilities[result.label]
    assert np.abs(np.diff([list(result.probabilities.values()) for result in results], axis=0)).max() > 0.01


def test_files_images_arrays_and_image_sets_give_the_same_labels(tmp_path):
    model, images = make_image_model(), pixels((30, 40), (21, 28))
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    files = [tmp_path / f"{i}.png" for i in range(2)]
    expected = model.classify(images)
    assert expected == model.classify(files) == model.classify([str(file) for file in files])
    assert expected == model.classify([Image.fromarray(image) for image in images])
    read = read_images(files, size=(12, 16))
    assert expected == model.classify(read)  # resized as in training
    np.testing.assert_array_equal(
        model.probabilities(read.pixels), np.array([list(one.probabilities.values()) for one in expected], np.float32)
    )


def test_gray_transparent_and_rotated_images():
    model = make_image_model()
    [image] = pixels((12, 16))
    gray = Image.fromarray(image).convert("L")
    as_color = np.repeat(np.asarray(gray)[..., None], 3, axis=2)
    assert model.classify([gray, np.asarray(gray), np.asarray(gray)[..., None]]) == model.classify([as_color] * 3)
    transparent = np.concatenate((image, np.zeros((12, 16, 1), np.uint8)), axis=2)
    assert model.classify([transparent]) == model.classify([np.full((12, 16, 3), 255, np.uint8)])
    rotated = Image.fromarray(np.ascontiguousarray(np.rot90(image)))
    rotated.getexif()[0x0112] = 6  # EXIF orientation of a camera held sideways
    assert model.classify([rotated]) == model.classify([image])
    gray_model = make_image_model(channels=1, mean=(0.5,), std=(0.5,))
    assert gray_model.classify([gray]) == gray_model.classify([as_color])


def test_results_do_not_depend_on_batching(monkeypatch):
    model, images = make_image_model(), pixels(*[(12, 16)] * 5)
    expected = model.classify(images)
    monkeypatch.setattr(image_model, "BATCH_TOKENS", 25)  # two images per batch
    for one, other in zip(expected, model.classify(images)):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)
    assert model.classify([]) == []
    assert model.probabilities(np.zeros((0, 12, 16, 3), np.uint8)).shape == (0, 3)


def test_stochastic_depth_is_off_after_training_mode():
    model, images = make_image_model(), pixels((12, 16))
    before = model.classify(images)
    model.model.train()
    assert model.classify(images) == before


# Masks


@pytest.mark.parametrize("segmenter", ["linear", "queries"])
def test_masks_have_the_size_of_the_image(segmenter):
    model = make_image_model("segment", segmenter=segmenter)
    images = pixels((12, 16), (12, 16), (24, 32), (20, 50), (7, 5))
    masks = model.segment(images)
    assert [one.shape for one in masks] == [image.shape[:2] for image in images]
    assert all(one.dtype == np.uint8 for one in masks)
    for image, mask in zip(images[:2], masks):
        np.testing.assert_array_equal(mask, model_logits(model, image).argmax(0))
    assert len(np.unique(masks[0])) > 1
    half = np.asarray(Image.fromarray(images[2]).resize((16, 12), Image.Resampling.BICUBIC))
    resized = torch.nn.functional.interpolate(model_logits(model, half)[None], (24, 32), mode="bilinear")[0]
    np.testing.assert_array_equal(masks[2], resized.argmax(0))
    # A wide image, not cropped: 12 rows as in training, and 30 columns rounded to a multiple of the patch size.
    wide_one = np.asarray(Image.fromarray(images[3]).resize((32, 12), Image.Resampling.BICUBIC))
    resized = torch.nn.functional.interpolate(model_logits(model, wide_one)[None], (20, 50), mode="bilinear")[0]
    np.testing.assert_array_equal(masks[3], resized.argmax(0))


# Errors


def test_missing_head_raises():
    with pytest.raises(RegardError, match=r"not trained to classify images\. .* --task classify-images"):
        make_image_model("segment").classify(pixels((12, 16)))
    with pytest.raises(RegardError, match=r"not trained to segment images\. .* --task segment"):
        make_image_model().segment(pixels((12, 16)))
    with pytest.raises(RegardError, match="not trained to classify"):
        make_image_model(labels=()).classify(pixels((12, 16)))


def test_invalid_images_raise_with_their_name(tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    for image, message in (
        (tmp_path / "bad.jpg", f"{tmp_path / 'bad.jpg'}: not a readable image"),
        (tmp_path / "no.jpg", f"{tmp_path / 'no.jpg'}: there is no such file."),
        (np.zeros((4, 4), np.float32), "image 2: an array of dtype float32 and shape (4, 4) is not an image."),
        (np.zeros((4, 4, 5), np.uint8), "image 2: an array of dtype uint8 and shape (4, 4, 5) is not an image."),
    ):
        with pytest.raises(RegardError) as caught:
            make_image_model().classify([*pixels((12, 16)), image])
        assert str(caught.value).startswith(message)


# Saving and loading


@pytest.mark.parametrize("head", ["none", "classify", "segment", "pixels"])
def test_loaded_model_equals_the_saved_one(tmp_path, head):
    model, images = make_image_model(head), pixels((12, 16), (30, 20))
    (tmp_path / "tokenizer.json").write_text("left by another model")
    with pytest.raises(RegardError, match="already contains a tokenizer"):
        regard.save(tmp_path, model)
    (tmp_path / "tokenizer.json").unlink()
    regard.save(tmp_path, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "training.json"]
    loaded = load(tmp_path, "cpu", expect=ImageModel)
    assert (loaded.training, loaded.model.config, loaded.tokenizers) == ({"step": 3}, model.model.config, ())
    if head == "classify":
        assert loaded.classify(images) == model.classify(images)
    if head == "segment":
        for one, other in zip(loaded.segment(images), model.segment(images)):
            np.testing.assert_array_equal(one, other)


def test_invalid_means_raise(tmp_path):
    make_image_model().save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mean"] == [0.4, 0.5, 0.6]
    assert "shared_tokenizer" not in config
    assert "special" not in config
    (tmp_path / "config.json").write_text(json.dumps(config | {"mean": ["0.4"]}))
    with pytest.raises(RegardError, match=r"mean\[0\] must be a number \(got '0.4'\)"):
        load(tmp_path, "cpu")


def test_loading_as_another_pipeline_raises(tmp_path):
    save(tmp_path, make_image_model())
    with pytest.raises(RegardError, match="contains an image model, not a text encoder"):
        load(tmp_path, "cpu", expect=TextEncoder)


# Preprocessing and mask values


def test_preprocessing_resizes_and_crops():
    image = pixels((24, 64))[0]
    for head, size in (("classify", (12, 16)), ("segment", (12, 32)), ("none", (12, 16))):
        model = make_image_model(head)
        preprocessed = model.preprocess(image)
        assert preprocessed.shape == (*size, 3)
        middle = np.asarray(Image.fromarray(image).resize((32, 12), Image.Resampling.BICUBIC))
        cut = (32 - size[1]) // 2
        np.testing.assert_allclose(preprocessed.astype(int), middle[:, cut : 32 - cut].astype(int), atol=3)


@pytest.mark.parametrize(
    ("labels", "values"),
    [
        (("1", "2", "3"), (1, 2, 3)),
        (("0", "254"), (0, 254)),
        (("cat", "2"), (0, 1)),
        (("0", "255"), (0, 1)),  # 255 means unlabeled
        (("01", "2"), (0, 1)),  # not a valid mask value
        (LABELS, (0, 1, 2)),
    ],
)
def test_numeric_labels_are_the_mask_values(labels, values):
    assert make_image_model("segment", labels=labels).mask_values == values
