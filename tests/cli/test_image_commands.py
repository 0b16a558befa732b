"""Models of images, and the commands that use them, as a user calls them."""

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

from regard.folder import ImageModel, save
from regard.models import ViT
from regard.models.vit import vit_pico
from regard.viewer.live import Live
from regard.viewer.masks import label_colours

SIZES = dict(width=32, heads=2, layers=2, feedforward=64, patch=4, image_height=8, image_width=12)
LABELS = ("dark", "grey", "light")
# The numbers that the masks hold, which are the segmenter's labels.
VALUES = (3, 7)


def shades(labels, seed=0):
    """Noise, (M, 8, 12, 3), as bright as its label says."""
    random = np.random.default_rng(seed)
    middle = np.array([40, 128, 215])[np.asarray(labels)][:, None, None, None]
    return (middle + random.integers(-25, 26, (len(labels), 8, 12, 3))).astype(np.uint8)


def halves(count, seed=0):
    """Pictures that are dark up to some column and light from there on, and masks of VALUES."""
    border = np.random.default_rng(seed).integers(2, 11, count)[:, None, None]
    light = np.broadcast_to(np.arange(12) >= border, (count, 8, 12))
    noise = np.random.default_rng(seed + 1).integers(-25, 26, (count, 8, 12, 3))
    return (np.where(light, 215, 40)[..., None] + noise).astype(np.uint8), np.where(light, *VALUES[::-1]).astype(
        np.uint8
    )


def learned(config, draw) -> ImageModel:
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
    save(folder, learned(vit_pico(**SIZES, pooling="class", registers=1, labels=LABELS), draw))
    return folder


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory) -> Path:
    def draw(step):
        pixels, masks = halves(8, step)
        return pixels, (masks == VALUES[1]).astype(np.int64)

    config = vit_pico(**SIZES, head="segment", segmenter="queries", labels=tuple(map(str, VALUES)))
    folder = tmp_path_factory.mktemp("models") / "segmenter"
    save(folder, learned(config, draw))
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """A folder with a folder for each class."""
    folder = tmp_path_factory.mktemp("photos")
    numbers = np.repeat([0, 1, 2], 5)
    for i, (label, pixels) in enumerate(zip(numbers, shades(numbers, seed=99))):
        (folder / LABELS[label]).mkdir(exist_ok=True)
        Image.fromarray(pixels).resize((24, 16)).save(folder / LABELS[label] / f"{i:02}.png")
    return folder


# classify


def test_pictures_and_how_likely_their_labels_are(run, classifier, photos):
    files = [photos / "dark/00.png", photos / "grey/05.png", photos / "light/10.png"]
    lines = [line.split("\t") for line in run("classify", classifier, *files).splitlines()]
    assert [label for label, _ in lines] == list(LABELS)
    assert all(0.5 < float(share) <= 1 for _, share in lines)
    shares = dict(one.split(" ") for one in run("classify", classifier, files[1], "--all").strip().split("\t"))
    assert list(shares) == list(LABELS)
    assert sum(map(float, shares.values())) == pytest.approx(1, abs=2e-4)
    assert shares["grey"] == lines[1][1]


def test_names_of_pictures_as_lines(run, monkeypatch, tmp_path, classifier, photos):
    names = f"{photos / 'dark/00.png'}\n{photos / 'light/10.png'}\n"
    (tmp_path / "list.txt").write_text(names)
    expected = run("classify", classifier, *names.split())
    assert run("classify", classifier, "--input", tmp_path / "list.txt") == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(names.encode())))
    assert run("classify", classifier) == expected


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "P", "I;16"])
def test_any_kind_of_picture_goes_into_a_model_of_colours(run, tmp_path, classifier, photos, mode):
    grey = Image.open(photos / "light/10.png").convert("L")
    picture = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257) if mode == "I;16" else grey.convert(mode)
    picture.save(tmp_path / "picture.tif")
    assert run("classify", classifier, tmp_path / "picture.tif").startswith("light\t")


def test_what_is_no_picture(refused, monkeypatch, tmp_path, classifier, photos):
    (tmp_path / "text.jpg").write_text("hello")
    said = refused("classify", classifier, photos / "dark/00.png", tmp_path / "text.jpg")
    assert said.startswith(f"regard: {tmp_path / 'text.jpg'}: not a picture that can be read. Replace or remove it")
    assert "BufferedReader" not in said
    broken = (photos / "dark/00.png").read_bytes()[:-60]
    (tmp_path / "broken.png").write_bytes(broken)
    assert "broken.png: not a picture that can be read" in refused("classify", classifier, tmp_path / "broken.png")
    assert "no.jpg: there is no such file" in refused("classify", classifier, tmp_path / "no.jpg")
    assert f"{tmp_path}: " in refused("classify", classifier, tmp_path)
    for most in (100, 300):  # beyond twice as many Pillow refuses by itself; below it only warns
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with warnings.catch_warnings(record=True) as caught:
            said = refused("classify", classifier, photos / "dark/00.png")
        assert "00.png: the picture has more than 0 million pixels, and is not decoded" in said
        assert not caught


def test_the_wrong_kind_of_model(refused, classifier, segmenter, photos, seq2seq_folder):
    assert "was not trained to classify" in refused("classify", segmenter, photos / "dark/00.png")
    assert "was not trained to segment" in refused("segment", classifier, photos / "dark/00.png")
    assert "holds a translator, not a model of images" in refused("segment", seq2seq_folder, "x.png")
    assert "holds a model of images, not a translator" in refused("translate", classifier, "x")
    assert "Images are not truncated" in refused("classify", classifier, "x.png", "--truncate")


# segment


@pytest.fixture
def half(tmp_path) -> Path:
    """Dark on the left, light on the right, larger than what the model was trained on."""
    pixels = np.full((40, 60, 3), 40, np.uint8)
    pixels[:, 30:] = 215
    Image.fromarray(pixels).save(tmp_path / "half.png")
    return tmp_path / "half.png"


def test_a_mask_has_the_pictures_size_the_masks_numbers_and_a_palette(run, tmp_path, segmenter, half):
    told = run("segment", segmenter, half, "--out", tmp_path / "mask.png", "--overlay", tmp_path / "seen.png")
    shares = {label: float(share) for label, share in (line.split("\t") for line in told.splitlines())}
    assert shares == pytest.approx({"3": 0.5, "7": 0.5}, abs=0.1)
    mask = Image.open(tmp_path / "mask.png")
    assert (mask.mode, mask.size) == ("P", (60, 40))
    assert np.asarray(mask)[20, [5, 55]].tolist() == list(VALUES)
    np.testing.assert_array_equal(np.asarray(mask.convert("RGB"))[20, [5, 55]], label_colours(2))
    assert np.mean(np.asarray(mask) == VALUES[1]) == pytest.approx(shares["7"], abs=1e-4)
    seen = imread(tmp_path / "seen.png")
    assert min(seen.shape[:2]) > 200
    assert len(np.unique(seen.reshape(-1, seen.shape[2]), axis=0)) > 50


def test_where_masks_cannot_go(refused, tmp_path, segmenter, half):
    before = sorted(tmp_path.iterdir())
    assert "mask.jpg: masks are .png" in refused("segment", segmenter, half, "--out", tmp_path / "mask.jpg")
    assert "x.gif: expected a file name ending in .png or .svg" in refused(
        "segment", segmenter, half, "--overlay", tmp_path / "x.gif"
    )
    assert "no.png: there is no such file" in refused("segment", segmenter, "no.png", "--out", tmp_path / "mask.png")
    assert sorted(tmp_path.iterdir()) == before


# evaluate


def test_labels_of_pictures_are_measured(run, tmp_path, classifier, photos):
    out, confusion = tmp_path / "r.json", tmp_path / "c.png"
    told = run("evaluate", classifier, "--data", photos, "--json", out, "--confusion", confusion)
    for word in ("15 pictures", "accuracy", "calibration error", "loss, nats", "pictures a second"):
        assert word in " ".join(told.split())
    found = json.loads(out.read_text())
    assert (found["pictures"], found["accuracy"], found["labels"]) == (15, 100.0, list(LABELS))
    assert found["confusion"] == [[5, 0, 0], [0, 5, 0], [0, 0, 5]]
    assert 0 < found["calibration_error"] < 50
    assert "top_5" not in found  # among three labels
    assert len(np.unique(imread(confusion)[..., 0])) > 20


def test_what_is_taken_for_what(run, tmp_path, classifier, photos):
    """In a table whose labels are partly wrong, and which has a name of its own for them."""
    rows = ["path,split,shade"]
    rows += [f"{photos / 'dark' / f'{i:02}.png'},test,{'light' if i == 0 else 'dark'}" for i in range(5)]
    (tmp_path / "index.csv").write_text("\n".join([*rows, f"{photos / 'grey/05.png'},train,grey"]))
    run(
        "evaluate", classifier, "--data", f"{tmp_path / 'index.csv'}:test", "--label", "shade", "--json", tmp_path / "r"
    )
    found = json.loads((tmp_path / "r").read_text())
    assert found["confusion"] == [[4, 0, 0], [0, 0, 0], [1, 0, 0]]
    assert found["accuracy"] == 80


def test_masks_are_measured(run, tmp_path, segmenter):
    pixels, masks = halves(6, seed=50)
    masks[0, :, :2] = 255  # nothing
    masks[1] = VALUES[0] + VALUES[1] - masks[1]  # wrong
    np.savez(tmp_path / "test.npz", images=pixels, masks=masks)
    confusion = tmp_path / "c.svg"
    told = run(
        "evaluate", segmenter, "--data", tmp_path / "test.npz", "--json", tmp_path / "r", "--confusion", confusion
    )
    found = json.loads((tmp_path / "r").read_text())
    counts = np.array(found["confusion"])
    assert counts.sum() == 6 * 8 * 12 - 16
    assert found["pixel_accuracy"] == pytest.approx(100 * np.trace(counts) / counts.sum())
    assert 70 < found["pixel_accuracy"] < 90
    assert list(found["iou"]) == ["3", "7"]
    assert found["mean_iou"] == pytest.approx(np.mean(list(found["iou"].values())))
    assert "mean intersection over union" in told
    assert "what its pixels were taken for" in " ".join(confusion.read_text().split())


def test_pictures_that_cannot_be_measured(refused, tmp_path, classifier, segmenter, photos):
    (tmp_path / "loose").mkdir()
    Image.new("RGB", (12, 8)).save(tmp_path / "loose/1.png")
    assert "The pictures have no labels" in refused("evaluate", classifier, "--data", tmp_path / "loose")
    assert "The pictures have no masks" in refused("evaluate", segmenter, "--data", photos)
    (tmp_path / "loose/bright").mkdir()
    (tmp_path / "loose/1.png").rename(tmp_path / "loose/bright/1.png")
    said = refused("evaluate", classifier, "--data", tmp_path / "loose")
    assert "the label 'bright', which the model does not know. Its labels are dark, grey, light." in said
    (tmp_path / "loose/bright/2.png").write_text("x")
    assert "2.png: not a picture" in refused("evaluate", classifier, "--data", tmp_path / "loose")
    np.savez(tmp_path / "odd.npz", images=np.zeros((1, 8, 12, 3), np.uint8), masks=np.full((1, 8, 12), 4, np.uint8))
    said = refused("evaluate", segmenter, "--data", tmp_path / "odd.npz")
    assert "Some masks hold the number 4, which the model does not know. Its labels are 3, 7; 255 is none." in said


def test_confusion_is_of_labels_and_a_picture(refused, tmp_path, classifier, photos, seq2seq_folder):
    said = refused("evaluate", seq2seq_folder, "--data", "x", "--confusion", tmp_path / "c.png")
    assert "gives no labels that could be confused" in said
    said = refused("evaluate", classifier, "--data", photos, "--confusion", tmp_path / "c.pdf")
    assert "c.pdf: expected a file name ending in .png or .svg" in said


# look and info


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "Where the class token looks in blocks.1.attention."),
        (["--patch", "1,2"], "Where the patch in row 1, column 2 looks in blocks.1.attention."),
        (["--attention", "blocks.0.attention", "--head", "1"], "Where the class token looks in blocks.0.attention."),
        (["--rollout"], "What the picture comes from, through all layers."),
        (["--label", "light"], "speaks for light."),
        (["--all"], "Where the class token looks, a row for each attention."),
    ],
)
def test_what_was_regarded_of_a_picture(run, tmp_path, classifier, photos, options, said):
    told = run("look", classifier, photos / "light/10.png", "--out", tmp_path / "map.svg", *options)
    assert told.startswith("light\t")
    words = " ".join((tmp_path / "map.svg").read_text().split())
    assert said in words
    assert ("head 0" in words) != ("--head" in options or "--rollout" in options or "--label" in options)


def test_what_a_segmenter_regarded(run, tmp_path, segmenter, half):
    assert run("look", segmenter, half, "--out", tmp_path / "map.svg", "--label", "7") == ""
    assert "Where the query of 7 looks" in " ".join((tmp_path / "map.svg").read_text().split())


def test_a_picture_goes_to_map_png_unless_told_otherwise(run, tmp_path, monkeypatch, classifier, photos):
    monkeypatch.chdir(tmp_path)
    run("look", classifier, photos / "light/10.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_of_a_picture(run, tmp_path, classifier, photos):
    out = tmp_path / "page.html"
    assert run("look", classifier, photos / "light/10.png", "--out", out, "--patch", "1,2").startswith("light\t")
    header = json.loads(re.search(r'id="scene">(.*?)</script>', out.read_text())[1])
    assert header["texts"]["source"] == "10.png"
    assert header["model"]["name"] == "classifier"
    assert header["opens"]["token"] == 2 + 5  # after the class token and a register


def test_a_live_page_can_be_asked_for_the_pictures_that_were_named(run, monkeypatch, classifier, photos):
    asked = []

    def closed(self, poll_interval=0.5):
        names = self.newest.told["scene"]["pictures"]
        asked.extend(self.ask({"look": {"picture": name}})["scene"]["texts"]["source"] for name in names)
        raise KeyboardInterrupt

    monkeypatch.setattr(Live, "serve_forever", closed)
    files = sorted(map(str, photos.rglob("*.png")))[:2]
    assert run("look", classifier, *files, "--live", "--no-browser") == ""
    assert asked == files


def test_what_cannot_be_looked_at(refused, tmp_path, monkeypatch, classifier, photos, seq2seq_folder):
    monkeypatch.chdir(tmp_path)
    file = photos / "light/10.png"
    assert "--patch 1;2 is not a row and a column. Write it like 3,5." in refused(
        "look", classifier, file, "--patch", "1;2"
    )
    assert "no patch in row 7, column 0" in refused("look", classifier, file, "--patch", "7,0")
    assert "does not know the label 'cow'" in refused("look", classifier, file, "--label", "cow")
    assert "x.htm: pages are .html, pictures are .png" in refused("look", classifier, file, "--out", "x.htm")
    assert "are for texts. Leave out --target" in refused("look", classifier, file, "--target", "x")
    assert "Rollout goes through all" in refused("look", classifier, file, "--rollout", "--all")
    assert "Only a picture has patches" in refused("look", seq2seq_folder, "one two", "--rollout")
    assert "is of one picture. Name one; or give --live" in refused("look", classifier, file, file)
    assert "no picture to look at" in refused("look", classifier, "--live")
    assert "'two' is one text too many. Put the sentence" in refused("look", seq2seq_folder, "one", "two")
    assert not list(tmp_path.iterdir())


def test_info_tells_of_a_model_of_images(run, classifier, segmenter):
    told = run("info", classifier)
    assert "tokeniser" not in told
    assert "('dark', 'grey', 'light')" in told
    for one in ("blocks.0.attention", "blocks.1.attention"):
        assert any(one in line and "kernel" in line for line in told.splitlines())
    assert "segmenter.blocks.1.attention" in run("info", segmenter)
