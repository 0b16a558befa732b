"""Makes the pictures of the page that README and docs show: python docs/screenshots.py MODEL

MODEL is the folder demo, which `make demo` leaves; a model of pictures learns here to tell the colour of a ball. Needs
Chromium and Playwright (requirements-dev.txt).
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
VIEWS = {"Heads": "page-heads.png", "Walk": "page-walk.png", "Decode": "page-decode.png"}
COLOURS = {"red": (0.85, 0.25, 0.2), "green": (0.2, 0.65, 0.3), "blue": (0.25, 0.4, 0.9)}
HEIGHT, WIDTH = 72, 108


def balls(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hills under a sky, and somewhere a ball of one of the colours."""
    y, x = torch.meshgrid(torch.linspace(0, 1, HEIGHT), torch.linspace(0, 1.5, WIDTH), indexing="ij")
    y, x = y.expand(count, -1, -1), x.expand(count, -1, -1)
    place, labels = torch.rand(count, 4, 1, 1), torch.randint(len(COLOURS), (count,))
    hills = y > 0.55 + 0.08 * torch.sin(5 * x + 6 * place[:, 0]) + 0.05 * torch.sin(11 * x + 6 * place[:, 1])
    sky = torch.stack((0.75 - 0.35 * y, 0.82 - 0.2 * y, 0.9 - 0.1 * y), 1)
    ground = torch.stack((0.55 - 0.25 * y, 0.5 - 0.15 * y, 0.35 - 0.15 * y), 1)
    pictures = torch.where(hills[:, None], ground, sky) + 0.03 * torch.randn(count, 3, HEIGHT, WIDTH)
    from_middle = ((x - 0.2 - 1.1 * place[:, 2]) ** 2 + (y - 0.2 - 0.6 * place[:, 3]) ** 2).sqrt() / 0.13
    shade = (1.15 - 0.45 * from_middle)[:, None] * torch.tensor(list(COLOURS.values()))[labels][:, :, None, None]
    return torch.where(from_middle[:, None] < 1, shade, pictures).clamp(0, 1), labels


def finder() -> ViT:
    """A Vision Transformer that has learned what colour the ball has."""
    sizes = dict(width=64, heads=4, layers=4, feedforward=128, patch=6, image_height=HEIGHT, image_width=WIDTH)
    model = ViT(ViTConfig(**sizes, labels=tuple(COLOURS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(400):
        pictures, labels = balls(16)
        loss = torch.nn.functional.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def clearest(look: Any) -> str:
    """The head in which the class token looks most at a single patch."""
    most = {f"{name}:{head}": one.max() for name in look.maps for head, one in enumerate(look.patch_weights(name))}
    return max(most, key=lambda name: most[name])


def shoot(page: Any, views: dict[str, str], look: Any) -> None:
    """A picture of some views of a look's page."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        look.save(file)
        page.goto(file.as_uri())
        for view, into in views.items():
            page.get_by_role("tab", name=view, exact=True).click()
            if view == "Images":
                page.locator(f'.thumb[data-shown="{clearest(look)}"]').click()
            page.wait_for_timeout(1500)  # until small maps are drawn
            page.screenshot(path=str(Path(__file__).with_name(into)))


def shoot_steps(page: Any, run: str, into: str) -> None:
    """A picture of an early step of a run beside its last, for the last one's translation."""
    models = [regard.load(one, "cpu") for one in list_step_folders(run).values()]
    target = models[-1](SENTENCE)
    steps = regard.compare(*(regard.look(model, SENTENCE, target) for model in models))
    shown = f"{steps.looks[-1].alignment.name}:mean"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.html"
        steps.save(file)
        page.set_viewport_size({"width": 1280, "height": 960})
        page.goto(file.as_uri() + f"#at=2/{shown}&with={len(models) - 1}/{shown}")
        page.wait_for_timeout(1500)
        page.screenshot(path=str(Path(__file__).with_name(into)))


def main() -> None:
    torch.manual_seed(0)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-quic"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        if len(sys.argv) > 1:
            shoot(page, VIEWS, regard.look(regard.load(sys.argv[1], "cpu"), SENTENCE))
            shoot_steps(browser.new_page(), sys.argv[1], "page-steps.png")
        with tempfile.TemporaryDirectory() as folder:
            photo = Path(folder) / "ball.png"
            model, pixels = finder(), (255 * balls(1)[0][0]).byte().permute(1, 2, 0)
            Image.fromarray(pixels.numpy()).save(photo)
            shoot(page, {"Images": "page-images.png"}, regard.look(model, photo, name="balls"))
        browser.close()


if __name__ == "__main__":
    main()
