"""`regard segment`: semantic segmentation of an image."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from regard.cli.common import DeviceOption, Model, Quiet, open_model, parse, plot_format, print_note
from regard.cli.options import Arg
from regard.data import read_image
from regard.errors import RegardError
from regard.files import check_output_file, write_atomically
from regard.pipelines import ImageModel
from regard.viewer.masks import mask_overlay, mask_png


@dataclass(frozen=True)
class Options:
    """Label every pixel of an image: regard segment MODEL photo.jpg --out mask.png

    The mask is a PNG of the size of the image, with a color per label and the pixel values of the training masks. Print
    the labels that occur, each with its share of the pixels. To measure masks, use regard evaluate.
    """

    model: Model
    image: Annotated[Path, Arg("IMAGE", is_positional=True)]
    """image file"""
    out: Path = Path("mask.png")
    """output file of the mask, .png"""
    overlay: Path | None = None
    """output file of the image overlaid with label colors and names, .png, .svg or .pdf"""
    device: DeviceOption = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "segment", argv)
    if options.out.suffix.lower() != ".png":
        raise RegardError(f"{options.out}: expected the extension .png.", "Change the file extension.")
    overlay_format = "" if options.overlay is None else plot_format(options.overlay)
    check_output_file(options.out, [options.image, options.overlay])
    if options.overlay is not None:
        check_output_file(options.overlay, [options.image])
    model = open_model(options.model, options.device, ImageModel)
    mask = model.segment(options.image)
    if options.overlay is not None:
        pixels = read_image(options.image)
        write_atomically(options.overlay, mask_overlay(pixels, mask, model.labels, options.image.name, overlay_format))
    write_atomically(options.out, mask_png(mask, model.mask_values))
    shares = np.bincount(mask.flatten(), minlength=len(model.labels)) / mask.size
    for label, share in zip(model.labels, shares):
        if share:
            print(f"{label}\t{share:.4f}")
    print_note(f"Wrote the mask to {options.out}.")
    return 0
