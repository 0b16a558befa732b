"""Limits of a server on the size and cost of requests."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass

from regard.decode import DecodeConfig
from regard.ranges import Count, Positive, check_ranges
from regard.serve.errors import RequestError


@dataclass(frozen=True)
class ServeLimits:
    """Limits on requests.

    >>> ServeLimits(max_beam=4).check_texts(["The cat sleeps."])
    """

    max_body_bytes: Count = 8 << 20
    """bytes of a request"""
    max_characters: Count = 20_000
    """characters of all texts of a request"""
    max_source_tokens: Count = 4096
    """tokens of a text, or of a sentence to translate: others wait while it is encoded, in quadratic time"""
    max_texts: Count = 256
    """texts or images of a request, and phrases that are forbidden"""
    max_required: Count = 32
    """phrases that are required"""
    max_phrase_characters: Count = 2000
    """characters of all phrases of a request"""
    max_pixels: Count = 50_000_000
    """pixels of all images of a request"""
    max_beam: Count = 16
    """hypotheses per text: beam width, n-best list or samples"""
    max_output_tokens: Count = 1024
    """tokens of an output"""
    timeout: Positive = 30.0
    """seconds for a request, unless it states less with the header X-Request-Timeout"""
    receive_timeout: Positive = 30.0
    """seconds in which a client must send its request"""

    def __post_init__(self) -> None:
        check_ranges(self, "limits.")

    def check_texts(
        self,
        texts: Sequence[Sized],
        *,
        prefixes: Sequence[str] | None = None,
        required: Sequence[str] | None = None,
        forbidden: Sequence[str] | None = None,
    ) -> None:
        """Raise an error if there are too many texts or phrases, or if they have too many characters."""
        phrases = [*(required or ()), *(forbidden or ())]
        for kind, count, limit in (
            ("texts", max(len(texts), len(prefixes or ())), self.max_texts),
            ("required phrases", len(required or ()), self.max_required),
            ("forbidden phrases", len(forbidden or ()), self.max_texts),
            ("characters in its phrases", sum(map(len, phrases)), self.max_phrase_characters),
            ("characters", sum(map(len, (*texts, *(prefixes or ()), *phrases))), self.max_characters),
        ):
            if count > limit:
                message = f"The request has {count} {kind}; at most {limit} are allowed."
                raise RequestError(
                    message, "Split it." if kind in ("texts", "characters") else "Leave some out.", status=413
                )

    def check_values(self, body: bytes | bytearray) -> None:
        """Raise an error if a JSON document has so many values that reading it would delay other requests.

        >>> ServeLimits().check_values(b"[" * 100_000)
        Traceback (most recent call last):
        regard.serve.errors.RequestError: The request has more than 30000 values. Split it.
        """
        limit = self.max_characters + 10_000
        if len(body) > limit and sum(map(body.count, (b",", b"[", b"{"))) > limit:
            raise RequestError(f"The request has more than {limit} values.", "Split it.", status=413)

    def check_sources(self, sources: Sequence[Sized]) -> None:
        """Raise an error if an encoded text is too long.

        >>> ServeLimits(max_source_tokens=3).check_sources([[4, 5, 6, 7]])
        Traceback (most recent call last):
        regard.serve.errors.RequestError: A text has 4 tokens; at most 3 are allowed. Split it.
        """
        longest = max(map(len, sources), default=0)
        if longest > self.max_source_tokens:
            message = f"A text has {longest} tokens; at most {self.max_source_tokens} are allowed."
            raise RequestError(message, "Split it.", status=413)

    def check_config(self, config: DecodeConfig) -> None:
        """Raise an error if a search is too expensive."""
        for name in ("beam", "n_best"):
            value = getattr(config, name)
            if value > self.max_beam:
                raise RequestError(f"{name} must be at most {self.max_beam} (got {value}).", "Lower it.")
        if config.max_len > self.max_output_tokens:
            raise RequestError(
                f"max_len must be at most {self.max_output_tokens} tokens (got {config.max_len}).", "Lower it."
            )

    def request_timeout(self, header: str | None) -> float:
        """The time limit of a request, from its header X-Request-Timeout in seconds.

        >>> ServeLimits().request_timeout("2.5"), ServeLimits().request_timeout(None)
        (2.5, 30.0)
        """
        if header is None:
            return self.timeout
        try:
            seconds = float(header)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= self.timeout:
            raise RequestError(
                f"X-Request-Timeout must be above 0 and at most {self.timeout:g} seconds.", "Change the header."
            )
        return seconds
