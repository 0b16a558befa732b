"""A model as a list of primitive operations, derived from its `forward`."""

from regard.graph.capture import capture as capture
from regard.graph.entries import forward_graph as forward_graph
from regard.graph.steps import Graph as Graph
from regard.graph.steps import Step as Step
