"""`regard answer`: extractive question answering."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from regard.cli.common import DeviceOption, Empty, Model, Quiet, check_utf8, open_model, parse, print_note
from regard.cli.options import Arg
from regard.config_reader import json_bytes
from regard.data.text.questions import Question, read_squad
from regard.errors import RegardError
from regard.files import STDOUT, check_output_file, write_output
from regard.pipelines import TextEncoder


@dataclass(frozen=True)
class Options:
    """Answer a question from a text: regard answer MODEL --question "Who chased the mouse?" --context "The cat …"

    With --data squad.json --out answers.json, answer all questions of a file. To measure the answers, use
    regard evaluate.
    """

    model: Model
    question: str = ""
    """the question"""
    context: str = ""
    """text that contains the answer"""
    data: Annotated[str, Arg("FILE")] = ""
    """file of questions in SQuAD format, plain or compressed"""
    out: Annotated[Path | None, Arg(default="standard output")] = None
    """output file: a JSON object of answers by question id"""
    empty: Empty = False
    device: DeviceOption = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "answer", argv)
    has_question = bool(options.question.strip() and options.context.strip())
    if has_question == bool(options.data):
        raise RegardError(
            "Expected either --question with --context, or --data.", "Pass --question and --context, or --data."
        )
    if has_question:
        question, context = check_utf8(options.question, "--question"), check_utf8(options.context, "--context")
        encoder = open_model(options.model, options.device, TextEncoder)
        print(encoder.answer(Question("", question, context), empty=options.empty))
        return 0
    check_output_file(options.out or STDOUT, [options.data])
    questions = read_squad(options.data)
    encoder = open_model(options.model, options.device, TextEncoder)
    answers = {question.id: text for question, text in zip(questions, encoder.answer(questions, empty=options.empty))}
    write_output(options.out or STDOUT, json_bytes(answers))
    if options.out is not None:
        print_note(f"Wrote {len(answers)} answers to {options.out}.")
    return 0
