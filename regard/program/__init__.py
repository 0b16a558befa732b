"""A model as a list of primitive operations, derived from its `forward`."""

from regard.program.capture import CapturedCall as CapturedCall
from regard.program.capture import capture as capture
from regard.program.entries import forward_program as forward_program
from regard.program.program_steps import Program as Program
from regard.program.program_steps import Step as Step
from regard.program.program_steps import build_program as build_program
