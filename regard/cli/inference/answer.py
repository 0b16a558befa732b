"""`regard answer`: the answer to a question, out of a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from regard.cli.common import Empty, Model, Quiet, as_text, note, open_model, parse
from regard.config_reader import json_bytes
from regard.data.text.questions import Question, read_squad
from regard.errors import RegardError
from regard.files import STDOUT, write_output
from regard.pipelines import Device, TextEncoder


@dataclass(frozen=True)
class Options:
    """Find the answer in a text: regard answer MODEL --question "Who chased the mouse?" --context "The cat …"

    Or in many: --data squad.json --out answers.json. How good they are, where the file has answers: regard evaluate.
    """

    model: Model
    question: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    context: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """the text with the answer in it"""
    data: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """questions in the layout of SQuAD, plain or compressed"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """where the answers go, as one JSON object from the questions' ids; by default to standard output"""
    empty: Empty = False
    device: Device = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "answer", argv)
    asked = bool(options.question.strip() and options.context.strip())
    if asked == bool(options.data):
        raise RegardError("There is nothing to answer, or too much.", "Give --question and --context, or --data.")
    if asked:
        question, context = as_text(options.question, "--question"), as_text(options.context, "--context")
        encoder = open_model(options.model, options.device, TextEncoder)
        print(encoder.answer(Question("", question, context), empty=options.empty))
        return 0
    questions = read_squad(options.data)
    encoder = open_model(options.model, options.device, TextEncoder)
    answers = {one.id: text for one, text in zip(questions, encoder.answer(questions, empty=options.empty))}
    write_output(options.out or STDOUT, json_bytes(answers))
    if options.out is not None:
        note(f"{len(answers)} answers are in {options.out}.")
    return 0
