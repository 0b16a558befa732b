"""A finished run of each task, on texts, on images of one size, and on images of different sizes ("ragged")."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regard.pipelines import ImageModel
from regard.training import Recipe, run_recipe
from tests.training import toy_images, toy_tasks

# The pipeline class of each case, and its validation metrics in addition to the loss.
CASES: dict[str, tuple[type[Any], set[str]]] = {
    **toy_tasks.KINDS,
    **{task: (ImageModel, metrics) for task, metrics in toy_images.EXTRA_METRICS.items()},
    "ragged classify-images": (ImageModel, toy_images.EXTRA_METRICS["classify-images"]),
    "ragged segment": (ImageModel, toy_images.EXTRA_METRICS["segment"]),
}


def toy(case: str, folder: Path, **sections: dict[str, Any]) -> Recipe:
    """Write the files of a case and return a small recipe for them."""
    make: Callable[..., Recipe] = toy_tasks.toy if case in toy_tasks.KINDS else toy_images.toy
    make = toy_images.toy_ragged if case.startswith("ragged") else make
    return make(case.removeprefix("ragged "), folder, **sections)


class Runs(dict[str, Path]):
    """The folders of finished runs by case; each is trained when it is first asked for. Tests read them."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self.make_folder = make_folder

    def __missing__(self, case: str) -> Path:
        folder = self.make_folder(case.replace(" ", "-"))
        run_recipe(toy(case, folder), folder / "out", quiet=True)
        self[case] = folder / "out"
        return self[case]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp)
