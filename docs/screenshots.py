"""Take the screenshots of the README and the docs: python docs/screenshots.py MODEL [FOLDER]

MODEL is the model folder that `make demo` trains. The other models are trained here in a few minutes: an image
classifier, which predicts the color of a ball, a language model and a masked language model. FOLDER, if given, receives
every first screen at full size: desktop, dark and phone. Requires Chromium and Playwright (requirements-dev.txt).
"""

import io
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import sync_playwright

import regard
from regard.data import read_pairs
from regard.models import ViT, ViTConfig, make_model
from regard.pipelines import TextEncoder
from regard.training import list_step_folders

SENTENCE = "The cat chased the mouse."
DOCS = Path(__file__).parent
VIEWS = {"": "page-heads.png", "#view=steps": "page-trace.png"}
SCREENS: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1280, "height": 860}},
    "dark": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}},
}
# Height of a screen in the overview of all first screens.
THUMBNAIL = 200
COLORS = {"red": (0.85, 0.25, 0.2), "green": (0.2, 0.65, 0.3), "blue": (0.25, 0.4, 0.9)}
HEIGHT, WIDTH = 72, 108


def draw_balls(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (B, 3, H, W) of hills, sky and a ball of a random color, and the indices of the colors."""
    y, x = torch.meshgrid(torch.linspace(0, 1, HEIGHT), torch.linspace(0, 1.5, WIDTH), indexing="ij")
    y, x = y.expand(count, -1, -1), x.expand(count, -1, -1)
    positions, labels = torch.rand(count, 4, 1, 1), torch.randint(len(COLORS), (count,))
    hills = y > 0.55 + 0.08 * torch.sin(5 * x + 6 * positions[:, 0]) + 0.05 * torch.sin(11 * x + 6 * positions[:, 1])
    sky = torch.stack((0.75 - 0.35 * y, 0.82 - 0.2 * y, 0.9 - 0.1 * y), 1)
    ground = torch.stack((0.55 - 0.25 * y, 0.5 - 0.15 * y, 0.35 - 0.15 * y), 1)
    scenery = torch.where(hills[:, None], ground, sky) + 0.03 * torch.randn(count, 3, HEIGHT, WIDTH)
    radius = ((x - 0.2 - 1.1 * positions[:, 2]) ** 2 + (y - 0.2 - 0.6 * positions[:, 3]) ** 2).sqrt() / 0.13
    shade = (1.15 - 0.45 * radius)[:, None] * torch.tensor(list(COLORS.values()))[labels][:, :, None, None]
    return torch.where(radius[:, None] < 1, shade, scenery).clamp(0, 1), labels


def train_classifier() -> ViT:
    """Train a Vision Transformer to predict the color of the ball."""
    sizes = dict(width=64, heads=4, layers=4, feedforward=128, patch=6, image_height=HEIGHT, image_width=WIDTH)
    model = ViT(ViTConfig(**sizes, labels=tuple(COLORS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(400):
        pixels, labels = draw_balls(16)
        loss = torch.nn.functional.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def train_text_models(folder: Path) -> dict[str, Any]:
    """Train a language model and a masked language model on sentences of the phrasebook."""
    text = folder / "text.txt"
    text.write_text("\n".join(source for source, _ in read_pairs(["phrasebook"])[:6000]) + "\n")
    sizes = {"width": 64, "heads": 4, "layers": 3, "feedforward": 128, "max_len": 64}
    options: dict[str, Any] = {"steps": 400, "workers": 1, "quiet": True, "tokenizer": {"kind": "word"}}
    return {
        task: regard.train(text, out=folder / task, task=task, model={"family": family, **sizes}, **options)
        for task, family in (("language", "gpt"), ("mask", "bert"))
    }


def make_embedder(encoder: TextEncoder) -> TextEncoder:
    """The encoder of a masked language model without its head, which embeds texts."""
    config = replace(encoder.model.config, head="none")
    model = make_model(config)
    model.load_state_dict(encoder.model.state_dict(), strict=False)
    return TextEncoder(model.eval(), encoder.tokenizer)


def save_compressed(content: bytes, path: Path) -> None:
    """Save a screenshot as a PNG with 256 colors."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def take_screenshot(browser: Any, file: Path, fragment: str, **options: Any) -> bytes:
    """Take a screenshot of a page after its thumbnails are drawn."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.goto(file.as_uri() + fragment)
    page.wait_for_selector(".regard:not([data-busy])")
    page.wait_for_timeout(1500)
    content = page.screenshot()
    context.close()
    return content


def take_first_screens(browser: Any, pages: dict[str, tuple[Path, str]], folder: Path | None) -> None:
    """Take every first screen on a desktop, in dark mode and on a phone; save an overview of all in the docs."""
    rows = []
    for name, (file, fragment) in pages.items():
        row = []
        for screen, options in SCREENS.items():
            content = take_screenshot(browser, file, fragment, **options)
            if folder is not None:
                save_compressed(content, folder / f"{name.replace(' ', '-')}-{screen}.png")
            image = Image.open(io.BytesIO(content)).convert("RGB")
            size = round(image.width * THUMBNAIL / image.height), THUMBNAIL
            row.append(image.resize(size, Image.Resampling.LANCZOS))
        rows.append(row)
    gap = 6
    width = 2 * (sum(image.width + gap for image in rows[0])) + gap
    height = -(-len(rows) // 2) * (THUMBNAIL + gap) + gap
    sheet = Image.new("RGB", (width, height), "#8a8f98")
    for i, row in enumerate(rows):
        x, y = gap + (i % 2) * (width - gap) // 2, gap + (i // 2) * (THUMBNAIL + gap)
        for image in row:
            sheet.paste(image, (x, y))
            x += image.width + gap
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    save_compressed(buffer.getvalue(), DOCS / "first-screens.png")


def take_screenshot_of_search(page: Any, look: Any, file_name: str) -> None:
    """Take a screenshot of the search tree of a look."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        look.save(file)
        page.goto(file.as_uri() + "#search=1")
        page.wait_for_selector(".tree")
        page.wait_for_timeout(1500)
        save_compressed(page.locator(".search-section").screenshot(), DOCS / file_name)


def take_screenshot_of_steps(page: Any, run: str, file_name: str) -> None:
    """Take a screenshot of an early and the last training step of a run, for the translation of the last one."""
    models = [regard.load(one, "cpu") for one in list_step_folders(run).values()]
    target = models[-1](SENTENCE)
    steps = regard.compare(*(regard.look(model, SENTENCE, target) for model in models))
    head = f"{steps.looks[-1].alignment.name}:mean"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.html"
        steps.save(file)
        page.set_viewport_size({"width": 1280, "height": 960})
        page.goto(file.as_uri() + f"#at=2/{head}&with={len(models) - 1}/{head}")
        page.wait_for_timeout(1500)
        save_compressed(page.screenshot(), DOCS / file_name)


def main(model_folder: str, folder: Path | None) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        work = Path(temporary)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-quic"]
        )
        translator = regard.load(model_folder, "cpu")
        models = train_text_models(work)
        pixels = (255 * draw_balls(1)[0][0]).byte().permute(1, 2, 0)
        Image.fromarray(pixels.numpy()).save(work / "ball.png")
        encoder = make_embedder(models["mask"])
        looks = {
            "translator": regard.look(translator, SENTENCE, name="demo"),
            "language model": regard.look(models["language"], "The cat chased the", name="gpt"),
            "masked word": regard.look(models["mask"], "The cat <mask> the mouse.", name="bert"),
            "embedder": regard.compare(
                *(regard.look(encoder, text, name="bert") for text in (SENTENCE, "The dog chased the cat."))
            ),
            "image classifier": regard.look(train_classifier(), work / "ball.png", name="balls"),
        }
        files = {name: work / f"{name}.html" for name in looks}
        for name, look in looks.items():
            look.save(files[name])
        for fragment, file_name in VIEWS.items():
            options = {"viewport": {"width": 1280, "height": 960}}
            save_compressed(take_screenshot(browser, files["translator"], fragment, **options), DOCS / file_name)
        image_options = {"viewport": {"width": 1280, "height": 1080}}
        content = take_screenshot(browser, files["image classifier"], "", **image_options)
        save_compressed(content, DOCS / "page-images.png")
        demo, head = files["translator"], "at=encoder.0.attention:1&pin=2,2"
        pages = {name: (file, "") for name, file in files.items()} | {
            "several heads": (demo, "#at=decoder.1.cross:0&and=decoder.1.cross:1&and=decoder.0.cross:1&as=lines"),
            "step by step idea": (demo, f"#view=steps&{head}&depth=idea"),
            "step by step formula": (demo, f"#view=steps&{head}&depth=formula"),
            "experiment": (demo, "#view=experiment&at=decoder.1.cross:0&off=decoder.1.cross:0"),
        }
        take_first_screens(browser, pages, folder)
        page = browser.new_page(viewport={"width": 1280, "height": 1080})
        take_screenshot_of_search(page, looks["translator"], "page-decode.png")
        take_screenshot_of_steps(browser.new_page(), model_folder, "page-steps.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None)
