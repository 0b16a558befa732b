"""What type checkers infer of the public functions: checked by mypy (see pyproject.toml), never run."""

from typing import assert_type

import regard
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator
from regard.viewer.image_look import ImageLook
from regard.viewer.text_look import Look


def check_training() -> None:
    assert_type(regard.train([("a", "b")]), Translator)
    assert_type(regard.train("books.txt", task="language", width=16), TextGenerator)
    assert_type(regard.train("reviews.tsv", task="classify"), TextEncoder)
    assert_type(regard.train("photos", task="mask-images"), ImageModel)


def check_loading() -> None:
    assert_type(regard.load("model"), Translator | TextGenerator | TextEncoder | ImageModel)
    assert_type(regard.load("model", expect=TextEncoder), TextEncoder)
    assert_type(regard.load(["first", "second"]), Translator)


def check_looking(translator: Translator, model: ImageModel) -> None:
    assert_type(regard.look(translator, "The cat sleeps."), Look)
    assert_type(regard.look(translator, ["The cat sleeps.", "She sleeps."]), list[Look])
    assert_type(regard.look(model, "photo.jpg"), ImageLook)
    assert_type(translator("The cat sleeps."), str)
