"""Commands on image models."""

import io
import json
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from PIL import Image

from regard.models import ViT
from regard.models.vit import vit_pico
from regard.pipelines import ImageModel, save
from regard.viewer.masks import label_colors
from regard.viewer.page.live_server import LiveServer

SIZES = dict(width=32, heads=2, layers=2, feedforward=64, patch=4, image_height=8, image_width=12)
LABELS = ("dark", "gray", "light")
# Pixel values of the masks, which are the labels of the segmenter.
VALUES = (3, 7)


def shades(labels, seed=0):
    """Noisy images (M, 8, 12, 3) with the brightness of their label."""
    random = np.random.default_rng(seed)
    middle = np.array([40, 128, 215])[np.asarray(labels)][:, None, None, None]
    return (middle + random.integers(-25, 26, (len(labels), 8, 12, 3))).astype(np.uint8)


def halves(count, seed=0):
    """Images that are dark up to a random column and light after it, and masks with VALUES."""
    border = np.random.default_rng(seed).integers(2, 11, count)[:, None, None]
    light = np.broadcast_to(np.arange(12) >= border, (count, 8, 12))
    noise = np.random.default_rng(seed + 1).integers(-25, 26, (count, 8, 12, 3))
    return (np.where(light, 215, 40)[..., None] + noise).astype(np.uint8), np.where(light, *VALUES[::-1]).astype(
        np.uint8
    )


def train_model(config, draw) -> ImageModel:
    torch.manual_seed(0)
    model = ViT(config)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(60):
        pixels, targets = draw(step)
        loss = torch.nn.functional.cross_entropy(
            model(torch.tensor(pixels).permute(0, 3, 1, 2) / 255), torch.tensor(targets)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return ImageModel(model.eval(), {"step": 60})


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    def draw(step):
        labels = np.random.default_rng(step).integers(0, 3, 16)
        return shades(labels, step), labels

    folder = tmp_path_factory.mktemp("models") / "classifier"
    save(folder, train_model(vit_pico(**SIZES, pooling="class", registers=1, labels=LABELS), draw))
    return folder


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory) -> Path:
    def draw(step):
        pixels, masks = halves(8, step)
        return pixels, (masks == VALUES[1]).astype(np.int64)

    config = vit_pico(**SIZES, head="segment", segmenter="queries", labels=tuple(map(str, VALUES)))
    folder = tmp_path_factory.mktemp("models") / "segmenter"
    save(folder, train_model(config, draw))
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """A folder with one sub-folder per class."""
    folder = tmp_path_factory.mktemp("photos")
    labels = np.repeat([0, 1, 2], 5)
    for i, (label, pixels) in enumerate(zip(labels, shades(labels, seed=99))):
        (folder / LABELS[label]).mkdir(exist_ok=True)
        Image.fromarray(pixels).resize((24, 16)).save(folder / LABELS[label] / f"{i:02}.png")
    return folder


# classify


def test_classify_prints_labels_and_probabilities(run, classifier, photos):
    files = [photos / "dark/00.png", photos / "gray/05.png", photos / "light/10.png"]
    lines = [line.split("\t") for line in run("classify", classifier, *files).splitlines()]
    assert [label for label, _ in lines] == list(LABELS)
    assert all(0.5 < float(probability) <= 1 for _, probability in lines)
    probabilities = dict(one.split(" ") for one in run("classify", classifier, files[1], "--all").strip().split("\t"))
    assert list(probabilities) == list(LABELS)
    assert sum(map(float, probabilities.values())) == pytest.approx(1, abs=2e-4)
    assert probabilities["gray"] == lines[1][1]


def test_classify_file_names_from_lines(run, monkeypatch, tmp_path, classifier, photos):
    names = f"{photos / 'dark/00.png'}\n{photos / 'light/10.png'}\n"
    (tmp_path / "list.txt").write_text(names)
    expected = run("classify", classifier, *names.split())
    assert run("classify", classifier, "--input", tmp_path / "list.txt") == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(names.encode())))
    assert run("classify", classifier) == expected


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "P", "I;16"])
def test_classify_converts_image_modes(run, tmp_path, classifier, photos, mode):
    gray = Image.open(photos / "light/10.png").convert("L")
    image = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257) if mode == "I;16" else gray.convert(mode)
    image.save(tmp_path / "image.tif")
    assert run("classify", classifier, tmp_path / "image.tif").startswith("light\t")


def test_invalid_images(run_error, monkeypatch, tmp_path, classifier, photos):
    (tmp_path / "text.jpg").write_text("hello")
    message = run_error("classify", classifier, photos / "dark/00.png", tmp_path / "text.jpg")
    assert message.startswith(f"regard: {tmp_path / 'text.jpg'}: not a readable image. Replace or remove it")
    assert "BufferedReader" not in message
    broken = (photos / "dark/00.png").read_bytes()[:-60]
    (tmp_path / "broken.png").write_bytes(broken)
    assert "broken.png: not a readable image" in run_error("classify", classifier, tmp_path / "broken.png")
    assert "no.jpg: there is no such file" in run_error("classify", classifier, tmp_path / "no.jpg")
    assert f"{tmp_path}: " in run_error("classify", classifier, tmp_path)
    for limit in (100, 300):  # Pillow raises an error above twice the limit and warns above the limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with warnings.catch_warnings(record=True) as caught:
            message = run_error("classify", classifier, photos / "dark/00.png")
        assert "00.png: the image has more than 0 million pixels and is not decoded" in message
        assert not caught


def test_unsuitable_models(run_error, classifier, segmenter, photos, seq2seq_folder):
    assert "was not trained to classify images" in run_error("classify", segmenter, photos / "dark/00.png")
    assert "was not trained to segment images" in run_error("segment", classifier, photos / "dark/00.png")
    assert "contains a translator, not an image model" in run_error("segment", seq2seq_folder, "x.png")
    assert "contains an image model, not a translator" in run_error("translate", classifier, "x")
    assert "--truncate is not supported for image models" in run_error("classify", classifier, "x.png", "--truncate")


# segment


@pytest.fixture
def half(tmp_path) -> Path:
    """An image that is dark on the left and light on the right, larger than in training."""
    pixels = np.full((40, 60, 3), 40, np.uint8)
    pixels[:, 30:] = 215
    Image.fromarray(pixels).save(tmp_path / "half.png")
    return tmp_path / "half.png"


def test_mask_has_image_size_mask_values_and_palette(run, tmp_path, segmenter, half):
    output = run("segment", segmenter, half, "--out", tmp_path / "mask.png", "--overlay", tmp_path / "overlay.png")
    shares = {label: float(share) for label, share in (line.split("\t") for line in output.splitlines())}
    assert shares == pytest.approx({"3": 0.5, "7": 0.5}, abs=0.1)
    mask = Image.open(tmp_path / "mask.png")
    assert (mask.mode, mask.size) == ("P", (60, 40))
    assert np.asarray(mask)[20, [5, 55]].tolist() == list(VALUES)
    np.testing.assert_array_equal(np.asarray(mask.convert("RGB"))[20, [5, 55]], label_colors(2))
    assert np.mean(np.asarray(mask) == VALUES[1]) == pytest.approx(shares["7"], abs=1e-4)
    overlay = imread(tmp_path / "overlay.png")
    assert min(overlay.shape[:2]) > 200
    assert len(np.unique(overlay.reshape(-1, overlay.shape[2]), axis=0)) > 50


def test_invalid_mask_files(run_error, tmp_path, segmenter, half):
    before = sorted(tmp_path.iterdir())
    assert "mask.jpg: expected the extension .png" in run_error(
        "segment", segmenter, half, "--out", tmp_path / "mask.jpg"
    )
    assert "x.gif: expected the extension .png, .svg or .pdf" in run_error(
        "segment", segmenter, half, "--overlay", tmp_path / "x.gif"
    )
    assert "no.png: there is no such file" in run_error("segment", segmenter, "no.png", "--out", tmp_path / "mask.png")
    assert sorted(tmp_path.iterdir()) == before


# evaluate


def test_evaluate_classification(run, tmp_path, classifier, photos):
    out, confusion = tmp_path / "r.json", tmp_path / "c.png"
    output = run("evaluate", classifier, "--data", photos, "--json", out, "--confusion", confusion)
    for word in ("15 images", "accuracy", "calibration error", "loss (nats)", "images per second"):
        assert word in " ".join(output.split())
    metrics = json.loads(out.read_text())
    assert (metrics["images"], metrics["accuracy"], metrics["labels"]) == (15, 100.0, list(LABELS))
    assert metrics["confusion"] == [[5, 0, 0], [0, 5, 0], [0, 0, 5]]
    assert 0 < metrics["calibration_error"] < 50
    assert "top_5" not in metrics  # fewer than five labels
    assert len(np.unique(imread(confusion)[..., 0])) > 20


def test_evaluate_confusion_counts(run, tmp_path, classifier, photos):
    """With a table that has some wrong labels and another name for the label column."""
    rows = ["path,split,shade"]
    rows += [f"{photos / 'dark' / f'{i:02}.png'},test,{'light' if i == 0 else 'dark'}" for i in range(5)]
    (tmp_path / "index.csv").write_text("\n".join([*rows, f"{photos / 'gray/05.png'},train,gray"]))
    run(
        "evaluate", classifier, "--data", f"{tmp_path / 'index.csv'}:test", "--label", "shade", "--json", tmp_path / "r"
    )
    metrics = json.loads((tmp_path / "r").read_text())
    assert metrics["confusion"] == [[4, 0, 0], [0, 0, 0], [1, 0, 0]]
    assert metrics["accuracy"] == 80


def test_evaluate_segmentation(run, tmp_path, segmenter):
    pixels, masks = halves(6, seed=50)
    masks[0, :, :2] = 255  # unlabeled
    masks[1] = VALUES[0] + VALUES[1] - masks[1]  # wrong
    np.savez(tmp_path / "test.npz", images=pixels, masks=masks)
    confusion = tmp_path / "c.svg"
    output = run(
        "evaluate", segmenter, "--data", tmp_path / "test.npz", "--json", tmp_path / "r", "--confusion", confusion
    )
    metrics = json.loads((tmp_path / "r").read_text())
    counts = np.array(metrics["confusion"])
    assert counts.sum() == 6 * 8 * 12 - 16
    assert metrics["pixel_accuracy"] == pytest.approx(100 * np.trace(counts) / counts.sum())
    assert 70 < metrics["pixel_accuracy"] < 90
    assert list(metrics["iou"]) == ["3", "7"]
    assert metrics["mean_iou"] == pytest.approx(np.mean(list(metrics["iou"].values())))
    assert "mean intersection over union" in output
    assert "predicted labels of its pixels" in " ".join(confusion.read_text().split())


def test_evaluate_invalid_images(run_error, tmp_path, classifier, segmenter, photos):
    (tmp_path / "loose").mkdir()
    Image.new("RGB", (12, 8)).save(tmp_path / "loose/1.png")
    assert "The images have no labels" in run_error("evaluate", classifier, "--data", tmp_path / "loose")
    assert "The images have no masks" in run_error("evaluate", segmenter, "--data", photos)
    (tmp_path / "loose/bright").mkdir()
    (tmp_path / "loose/1.png").rename(tmp_path / "loose/bright/1.png")
    message = run_error("evaluate", classifier, "--data", tmp_path / "loose")
    assert "the label 'bright', which the model does not have. Its labels are dark, gray, light." in message
    (tmp_path / "loose/bright/2.png").write_text("x")
    assert "2.png: not a readable image" in run_error("evaluate", classifier, "--data", tmp_path / "loose")
    np.savez(tmp_path / "odd.npz", images=np.zeros((1, 8, 12, 3), np.uint8), masks=np.full((1, 8, 12), 4, np.uint8))
    message = run_error("evaluate", segmenter, "--data", tmp_path / "odd.npz")
    assert "The masks contain the value 4, which is not a label of the model." in message
    assert "Use its labels (3, 7), or 255 for unlabeled pixels." in message


def test_invalid_confusion_plots(run_error, tmp_path, classifier, photos, seq2seq_folder):
    message = run_error("evaluate", seq2seq_folder, "--data", "x", "--confusion", tmp_path / "c.png")
    assert "--confusion requires a classification or segmentation model" in message
    message = run_error("evaluate", classifier, "--data", photos, "--confusion", tmp_path / "c.gif")
    assert "c.gif: expected the extension .png, .svg or .pdf" in message


# look and info


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Attention of the class token in blocks.1.attention."),
        (["--patch", "1,2"], "Attention of the patch in row 1, column 2 in blocks.1.attention."),
        (["--attention", "blocks.0.attention", "--head", "1"], "Attention of the class token in blocks.0.attention."),
        (["--rollout"], "Attention rollout of the image through all layers."),
        (["--label", "light"], "weighted by gradients of light."),
        (["--all"], "Attention of the class token, one row per attention."),
    ],
)
def test_look_at_an_image(run, tmp_path, classifier, photos, options, message):
    output = run("look", classifier, photos / "light/10.png", "--out", tmp_path / "map.svg", *options)
    assert output.startswith("light\t")
    words = " ".join((tmp_path / "map.svg").read_text().split())
    assert message in words
    assert ("head 0" in words) != ("--head" in options or "--rollout" in options or "--label" in options)


def test_look_at_a_segmenter(run, tmp_path, segmenter, half):
    assert run("look", segmenter, half, "--out", tmp_path / "map.svg", "--label", "7") == ""
    assert "Attention of the query of 7 in" in " ".join((tmp_path / "map.svg").read_text().split())


def test_look_at_an_image_writes_map_png_by_default(run, tmp_path, monkeypatch, classifier, photos):
    monkeypatch.chdir(tmp_path)
    run("look", classifier, photos / "light/10.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_look_writes_an_image_page(run, tmp_path, classifier, photos):
    out = tmp_path / "page.html"
    assert run("look", classifier, photos / "light/10.png", "--out", out, "--patch", "1,2").startswith("light\t")
    header = json.loads(re.search(r'id="scene">(.*?)</script>', out.read_text())[1])
    assert header["texts"]["source"] == "10.png"
    assert header["model"]["name"] == "classifier"
    assert header["initial"]["token"] == 2 + 5  # after the class token and one register token


def test_live_page_serves_the_named_images(run, monkeypatch, classifier, photos):
    served = []

    def closed(self, poll_interval=0.5):
        names = self.initial.header["scene"]["images"]
        served.extend(self.respond({"look": {"image": name}})["scene"]["texts"]["source"] for name in names)
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveServer, "serve_forever", closed)
    files = sorted(map(str, photos.rglob("*.png")))[:2]
    assert run("look", classifier, *files, "--live", "--no-browser") == ""
    assert served == files


def test_invalid_look_options_for_images(run_error, tmp_path, monkeypatch, classifier, photos, seq2seq_folder):
    monkeypatch.chdir(tmp_path)
    file = photos / "light/10.png"
    assert "--patch 1;2 is invalid; expected ROW,COLUMN. For example: --patch 3,5." in run_error(
        "look", classifier, file, "--patch", "1;2"
    )
    assert "no patch in row 7, column 0" in run_error("look", classifier, file, "--patch", "7,0")
    assert "has no label 'cow'" in run_error("look", classifier, file, "--label", "cow")
    assert "x.htm: pages are .html, plots are .png" in run_error("look", classifier, file, "--out", "x.htm")
    assert "--target, --context, --layers and --truncate are not supported for image models" in run_error(
        "look", classifier, file, "--target", "x"
    )
    assert "Rollout combines all" in run_error("look", classifier, file, "--rollout", "--all")
    assert "--patch, --rollout and --label require an image model" in run_error(
        "look", seq2seq_folder, "one two", "--rollout"
    )
    assert "Several images require --live. Pass one image" in run_error("look", classifier, file, file)
    assert "The image file is missing" in run_error("look", classifier, "--live")
    assert "Unexpected argument 'two'. Quote the sentence" in run_error("look", seq2seq_folder, "one", "two")
    assert not list(tmp_path.iterdir())


def test_info_of_image_models(run, classifier, segmenter):
    output = run("info", classifier)
    assert "tokenizer" not in output
    assert "('dark', 'gray', 'light')" in output
    for one in ("blocks.0.attention", "blocks.1.attention"):
        assert any(one in line and "kernel" in line for line in output.splitlines())
    assert "segmenter.blocks.1.attention" in run("info", segmenter)
