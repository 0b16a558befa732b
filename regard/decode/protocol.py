"""What decoding asks of a model, of its source, and of its vocabulary."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.offsets import Offsets
from regard.data.text.special_tokens import Special

SPECIAL = Special()


@runtime_checkable
class Source(Protocol):
    """B source sequences, of which decoding itself asks only the lengths. A `Packed` is one."""

    @property
    def offsets(self) -> Offsets: ...


@runtime_checkable
class Decodable(Protocol):
    """A model that can be decoded. Its state has rows (B, K): K hypotheses ("beams") for each of B sentences.

    The state is the model's own affair. It begins with K = 1, and `reorder` alone changes B and K.
    """

    def start(self, source: Any) -> Any:
        """Read the source; give a state of (B, 1) rows."""

    def step(self, state: Any, last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], Any]:
        """Take in each row's last token; give the scores of what may follow, and the new state."""

    def reorder(self, state: Any, indices: Int[Tensor, "B2 K2"]) -> Any:
        """A state whose row (b, k) is the old row indices[b, k], counted flat: old sentence * old K + old beam.

        All beams of a new sentence come from one old sentence, so what depends on the source alone can stay shared.
        """
