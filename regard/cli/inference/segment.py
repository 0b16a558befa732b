"""`regard segment`: each pixel of a picture gets its label."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from regard.cli.common import Model, Quiet, note, open_model, parse, plot_format
from regard.data import read_image
from regard.errors import RegardError
from regard.files import write_whole
from regard.pipelines import Device, ImageModel
from regard.viewer.plots.mask_overlays import mask_overlay, mask_png


@dataclass(frozen=True)
class Options:
    """Label every pixel of an image: regard segment MODEL photo.jpg --out mask.png

    The mask is a PNG as large as the picture, with a colour for each label; its numbers are those of the masks that the
    model was trained on. Labels that occur are told on standard output, each with its share of the pixels. How good
    masks are: regard evaluate.
    """

    model: Model
    picture: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PICTURE")]
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("mask.png")
    """the mask, .png"""
    overlay: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """the labels' colours over the picture, with their names; .png or .svg"""
    device: Device = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "segment", argv)
    if options.out.suffix.lower() != ".png":
        raise RegardError(f"{options.out}: masks are .png.", "Change the name's ending.")
    form = "" if options.overlay is None else plot_format(options.overlay)
    model = open_model(options.model, options.device, ImageModel)
    mask = model.segment(options.picture)
    if options.overlay is not None:
        pixels = read_image(options.picture)
        write_whole(options.overlay, mask_overlay(pixels, mask, model.labels, options.picture.name, form))
    write_whole(options.out, mask_png(mask, model.mask_values))
    shares = np.bincount(mask.flatten(), minlength=len(model.labels)) / mask.size
    for label, share in zip(model.labels, shares):
        if share:
            print(f"{label}\t{share:.4f}")
    note(f"The mask is in {options.out}.")
    return 0
