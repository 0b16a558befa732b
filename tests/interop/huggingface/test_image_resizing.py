"""Resizing of images as a checkpoint defines it."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from regard.data.images.decoding import Resizing
from regard.interop import export_huggingface, import_huggingface
from regard.interop.foreign_config import ForeignConfig
from regard.interop.huggingface.image_resizing import read_resizing, read_timm_resizing
from regard.models import ViTConfig
from regard.pipelines import load
from tests.interop.image_model_comparison import MEAN, STD, make_hf_model

SIZES = [(53, 31), (30, 47), (24, 24), (9, 70)]
PROCESSORS = [
    {"image_processor_type": "ViTImageProcessor", "size": {"height": 24, "width": 24}, "resample": 2},
    {"image_processor_type": "ViTImageProcessor", "size": {"height": 24, "width": 24}, "resample": 3},
    {"image_processor_type": "ViTImageProcessor", "size": {"height": 24, "width": 24}},
    {"image_processor_type": "DeiTImageProcessor", "size": {"height": 28, "width": 28}, "crop_size": 24},
    {"image_processor_type": "DeiTImageProcessor", "size": {"shortest_edge": 27}, "crop_size": 24, "resample": 1},
    {"image_processor_type": "DeiTImageProcessor", "size": {"shortest_edge": 19}, "crop_size": 24, "resample": 3},
    {"image_processor_type": "DeiTImageProcessor", "do_resize": False, "crop_size": 24},
]


def make_images() -> list[Image.Image]:
    """Random images of several aspect ratios, smooth enough to differ between filters."""
    random = np.random.default_rng(3)
    small = [random.integers(0, 256, (height // 3 + 2, width // 3 + 2, 3), np.uint8) for height, width in SIZES]
    return [Image.fromarray(one).resize(size[::-1], Image.Resampling.BICUBIC) for one, size in zip(small, SIZES)]


@pytest.mark.parametrize("table", PROCESSORS, ids=str)
def test_pixels_equal_those_of_transformers(transformers, tmp_path, table):
    make_hf_model(transformers, "DeiTForImageClassification", 0, tmp_path / "in", image_size=24)
    table = table | {"image_mean": MEAN, "image_std": STD}
    (tmp_path / "in/preprocessor_config.json").write_text(json.dumps(table))
    import_huggingface(tmp_path / "in").save(tmp_path / "saved")
    pipeline = load(tmp_path / "saved", "cpu")
    export_huggingface(pipeline, tmp_path / "out")
    for folder in ("in", "out"):
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / folder, backend="pil")
        for image in make_images():
            expected = processor(image, return_tensors="np", do_normalize=False)["pixel_values"][0]
            pixels = pipeline.preprocess(image).transpose(2, 0, 1) / np.float32(255)
            np.testing.assert_allclose(pixels, expected, atol=1e-6)


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize(("height", "width"), [(24, 24), (24, 32)])
def test_timm_resizing(mode, height, width):
    """The definition of timm's `transforms_imagenet_eval`, with Pillow: timm is not installed where the tests run.

    timm 1.0.31 itself gives the same pixels for these images.
    """
    config = ViTConfig(image_height=height, image_width=width)
    table = {"pretrained_cfg": {"crop_pct": 0.9, "interpolation": "bilinear", "crop_mode": mode}}
    resizing = read_timm_resizing(table, config, "config.json")
    target = math.floor(height / 0.9), math.floor(width / 0.9)
    for image in make_images():
        if mode == "squash":
            rows, columns = target
        elif height == width:
            shortest = min(image.size)
            rows, columns = (int(target[0] * side / shortest) for side in (image.height, image.width))
        else:
            ratio = min(image.height / target[0], image.width / target[1])
            rows, columns = round(image.height / ratio), round(image.width / ratio)
        resized = image.resize((columns, rows), Image.Resampling.BILINEAR)
        top, left = round((rows - height) / 2), round((columns - width) / 2)
        expected = np.asarray(resized)[top : top + height, left : left + width]
        np.testing.assert_array_equal(np.asarray(resizing.apply(image)), expected)


def test_unsupported_resizing_is_reported(caplog):
    config = ViTConfig(image_height=24, image_width=24)
    with caplog.at_level("WARNING", "regard"):
        assert read_timm_resizing({"crop_mode": "border"}, config, "config.json") is None
        assert read_resizing(ForeignConfig({"size": {"longest_edge": 24}}, "x.json"), config, "ViTModel") is None
        assert read_resizing(ForeignConfig({"size": 30, "resample": 9}, "x.json"), config, "ViTModel") is None
    assert [name in record.getMessage() for name, record in zip(("border", "longest_edge", "9"), caplog.records)] == [
        True
    ] * 3
    assert read_resizing(ForeignConfig({"image_mean": [0.5]}, "x.json"), config, "ViTModel") is None  # no size at all
    default = read_resizing(ForeignConfig({"do_normalize": True}, "x.json"), ViTConfig(), "ViTModel")
    assert default == Resizing(size=(224, 224), resample="bilinear")
