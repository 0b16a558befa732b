"""Take the screenshots of the README and the docs: python docs/screenshots.py MODEL

MODEL is the model folder that `make demo` trains. The image classifier, which predicts the color of a ball, is trained
here. Requires Chromium and Playwright (requirements-dev.txt).
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import sync_playwright

import regard
from regard.models import ViT, ViTConfig
from regard.training import list_step_folders

SENTENCE = "The cat chased the mouse."
VIEWS = {"Attention": "page-heads.png", "Step by step": "page-walk.png"}
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


def take_screenshots(page: Any, views: dict[str, str], look: Any) -> None:
    """Take a screenshot of each of some views of a look."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        look.save(file)
        page.goto(file.as_uri())
        for view, file_name in views.items():
            page.get_by_role("tablist", name="View").get_by_role("tab", name=view, exact=True).click()
            page.wait_for_timeout(1500)  # until the thumbnails are drawn
            page.screenshot(path=str(Path(__file__).with_name(file_name)))


def take_screenshot_of_search(page: Any, look: Any, file_name: str) -> None:
    """Take a screenshot of the search tree of a look."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        look.save(file)
        page.goto(file.as_uri() + "#search=1")
        page.wait_for_selector(".tree")
        page.wait_for_timeout(1500)
        page.locator(".search-section").screenshot(path=str(Path(__file__).with_name(file_name)))


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
        page.screenshot(path=str(Path(__file__).with_name(file_name)))


def main() -> None:
    torch.manual_seed(0)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-quic"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1080})
        if len(sys.argv) > 1:
            look = regard.look(regard.load(sys.argv[1], "cpu"), SENTENCE)
            take_screenshots(page, VIEWS, look)
            take_screenshot_of_search(page, look, "page-decode.png")
            take_screenshot_of_steps(browser.new_page(), sys.argv[1], "page-steps.png")
        with tempfile.TemporaryDirectory() as folder:
            image_file = Path(folder) / "ball.png"
            model, pixels = train_classifier(), (255 * draw_balls(1)[0][0]).byte().permute(1, 2, 0)
            Image.fromarray(pixels.numpy()).save(image_file)
            take_screenshots(page, {"Attention": "page-images.png"}, regard.look(model, image_file, name="balls"))
        browser.close()


if __name__ == "__main__":
    main()
