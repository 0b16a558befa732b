"""Animations: the same attention in several looks, one frame each, as a GIF file."""

import io
from collections.abc import Sequence

from PIL import Image

from regard.viewer.plots.heatmaps import HeadPanels, plot_heat_map

FRAME_MS, LAST_FRAME_MS = 700, 2500
"""durations of the frames and of the last one, in milliseconds"""
SCALE = 0.625
"""size of a frame relative to a plot"""


def plot_animation(frames: Sequence[HeadPanels], title: str, caption: str, kind: str) -> bytes:
    """Plot the first head of each attention as a frame of an endless GIF; the name of a frame follows the title.

    >>> frames = [HeadPanels(f"step {n}", np.eye(2)[None], ["a", "b"], ["c", "d"]) for n in (0, 50)]  # doctest: +SKIP
    >>> plot_animation(frames, "decoder.1.cross", "a b → c d", "cross")[:6]  # doctest: +SKIP
    b'GIF89a'
    """
    images = [_frame(one, f"{title} · {one.name}", caption, kind) for one in frames]
    width, height = max(image.width for image in images), max(image.height for image in images)
    padded = []
    for image in images:
        canvas = Image.new("RGB", (width, height), "white")
        canvas.paste(image)
        padded.append(canvas.quantize(256, dither=Image.Dither.NONE))
    buffer = io.BytesIO()
    durations = [FRAME_MS] * (len(padded) - 1) + [LAST_FRAME_MS]
    padded[0].save(buffer, "GIF", save_all=True, append_images=padded[1:], duration=durations, loop=0, disposal=1)
    return buffer.getvalue()


def _frame(one: HeadPanels, title: str, caption: str, kind: str) -> Image.Image:
    content = plot_heat_map(one.weights[0], one.rows, one.columns, title, kind, "png", note=caption)
    image = Image.open(io.BytesIO(content)).convert("RGB")
    size = round(SCALE * image.width), round(SCALE * image.height)
    return image.resize(size, Image.Resampling.LANCZOS)
