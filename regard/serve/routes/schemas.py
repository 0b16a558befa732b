"""Bodies of requests, validated by pydantic; the OpenAPI description shows them."""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from regard.decode import DecodeConfig
from regard.pipelines.translation import Split


def check_text(text: str) -> str:
    """The text, if it can be encoded as UTF-8: JSON may contain halves of surrogate pairs.

    >>> check_text("été")
    'été'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text in UTF-8") from None
    return text


def _check_pair(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("must be a pair of texts")
    return value


BRANCH = "|"
"""first character of the names of alternatives, which are not part of the place of an error"""


def _choose(choose: Callable[[Any], str | None], expected: str) -> Discriminator:
    """Chooses among alternatives by the value, so that errors are about one of them."""
    return Discriminator(choose, custom_error_type="wrong_type", custom_error_message=f"must be {expected}")


def _kind_of(value: Any) -> str | None:
    """The alternative of a value: a text, texts, the ids of tokens, or lists of them."""
    if isinstance(value, list):
        first = type(value[0]) if value else str
        return {int: "|ids", list: "|id lists"}.get(first, "|texts")
    return "|text" if isinstance(value, str) else None


# Lists are read until the first error: listing all errors of a long one would stall the server.
Text = Annotated[str, AfterValidator(check_text)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
Pair = Annotated[tuple[Text, Text], BeforeValidator(_check_pair)]
TokenIds = Annotated[list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]], Field(fail_fast=True)]
TextOrTexts = Annotated[
    Annotated[Text, Tag("|text")] | Annotated[Texts, Tag("|texts")],
    _choose(lambda value: {str: "|text", list: "|texts"}.get(type(value)), "a string or a list of strings"),
]
TextOrPair = Annotated[
    Annotated[Text, Tag("|text")] | Annotated[Pair, Tag("|pair")],
    _choose(lambda value: {str: "|text", list: "|pair", tuple: "|pair"}.get(type(value)), "a text or a pair of texts"),
]
Images = Annotated[list[str], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag("|text")]
    | Annotated[Texts, Tag("|texts")]
    | Annotated[TokenIds, Tag("|ids")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("|id lists")],
    _choose(_kind_of, "a string, a list of strings, a list of token ids or a list of such lists"),
]
Name = Annotated[str, Field(max_length=300), AfterValidator(check_text)]
ModelName = Annotated[Name | None, Field(description="name of the model; not needed if only one has this task")]

TargetLanguage = Annotated[Name | None, Field(description="target language, for a translator of several")]
SourceLanguage = Annotated[Name | None, Field(description="source language, for a translator that needs it")]


MAX_FIELDS = 100


class StrictObject(BaseModel):
    """An object whose unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, values: Any) -> Any:
        if isinstance(values, dict) and len(values) > MAX_FIELDS:  # each would be an error
            raise ValueError(f"has {len(values)} fields; at most {MAX_FIELDS} are allowed")
        return values


class Body(StrictObject):
    """Base class of the native requests."""

    model: ModelName = None


class DecodeOptions(StrictObject):
    """Options of the search: see `DecodeConfig`."""

    method: Literal["greedy", "beam", "sample"] | None = None
    beam: int | None = None
    n_best: int | None = None
    length_penalty: float | None = None
    max_len: int | None = None
    min_len: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    shortlist: bool | None = None

    def to_config(self, defaults: DecodeConfig) -> DecodeConfig:
        """The decoding configuration; fields that are not set have their defaults.

        >>> config = DecodeOptions(beam=2).to_config(DecodeConfig(length_penalty=0.6))
        >>> config.beam, config.length_penalty
        (2, 0.6)
        """
        return _make_config(defaults, tuple(self.model_dump(exclude_none=True).items()))


@lru_cache  # requests repeat their options, and each check takes time
def _make_config(defaults: DecodeConfig, options: tuple[tuple[str, Any], ...]) -> DecodeConfig:
    return dataclasses.replace(defaults, **dict(options))


class TranslateBody(Body):
    texts: Texts
    to: TargetLanguage = None
    source_language: SourceLanguage = None
    options: DecodeOptions = DecodeOptions()
    prefixes: Texts | None = Field(None, description="forced beginning of each translation")
    required: Texts | None = Field(None, description="phrases that every translation must contain")
    forbidden: Texts | None = Field(None, description="phrases that no translation may contain")
    split: Split = Field("auto", description="lines to split into sentences")
    truncate: bool = False


class GenerateBody(Body):
    prompts: Texts
    options: DecodeOptions = DecodeOptions()
    forbidden: Texts | None = None
    truncate: bool = False
    stream: bool = Field(False, description="server-sent events, for a single prompt")


class ClassifyBody(Body):
    texts: Annotated[list[TextOrPair], Field(fail_fast=True)] | None = Field(
        None, description="texts or pairs of texts"
    )
    images: Images | None = Field(None, description="image files in base64")
    truncate: bool = False


class SegmentBody(Body):
    images: Images = Field(description="image files in base64")


class AskedQuestion(StrictObject):
    question: Text
    context: Text


class AnswerBody(Body):
    questions: Annotated[list[AskedQuestion], Field(fail_fast=True)]
    empty: bool = Field(False, description="whether an answer may be empty")


class EmbedBody(Body):
    texts: Texts
    truncate: bool = False


class ScoreBody(Body):
    texts: Texts | None = Field(None, description="texts to score with a language model")
    pairs: Annotated[list[Pair], Field(fail_fast=True)] | None = Field(
        None, description="source and target, to score with a translator"
    )
    to: TargetLanguage = None
    source_language: SourceLanguage = None
    truncate: bool = False


class AttentionBody(Body):
    text: Text | None = Field(None, description="text that the model processes")
    target: Text | None = Field(None, description="output to force; by default a translator translates")
    to: TargetLanguage = None
    source_language: SourceLanguage = None
    context: Text | None = Field(None, description="for question answering, the text that the question is about")
    image: str | None = Field(None, description="image file in base64")
    format: Literal["page", "arrays"] = Field("page", description="an HTML page, or the weights as JSON")


class LibreTranslateBody(BaseModel):
    q: TextOrTexts
    source: Name = "auto"
    target: Name
    format: Literal["text", "html"] = "text"
    alternatives: int = Field(0, ge=0)
    api_key: Text | None = None


class DetectBody(BaseModel):
    q: Text
    api_key: Text | None = None


_NEUTRAL = {"best_of": 1, "response_format": {"type": "text"}}
"""values of unsupported fields that ask for what is done without them; so do null, false, 0 and empty ones"""


class OpenAIObject(StrictObject):
    """Base class of objects in OpenAI's format: fields that are not supported are errors, unless they ask for nothing.

    >>> CompletionBody.model_validate({"model": "m", "prompt": "a", "best_of": 1, "logit_bias": {}}).prompt
    'a'
    """

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = cls.model_fields
        return {key: value for key, value in values.items() if key in known or (value and value != _NEUTRAL.get(key))}


class OpenAIBody(OpenAIObject):
    model: Name
    user: str | None = Field(None, description="without effect")


class StreamOptions(OpenAIObject):
    include_usage: bool | None = Field(False, description="a last event with the numbers of tokens")


class GenerationBody(OpenAIBody):
    """What completions and chats share."""

    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, gt=0, le=1)
    n: int | None = Field(1, ge=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: TextOrTexts | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)


class CompletionBody(GenerationBody):
    prompt: Prompt
    max_tokens: int | None = Field(16, ge=0, description="0 only with echo")
    logprobs: int | None = Field(
        None, ge=0, le=1, description="log-probabilities; 1: with those of the likeliest tokens"
    )
    echo: bool | None = Field(False, description="whether prompts are part of the texts and log-probabilities")


class ChatMessage(OpenAIObject):
    role: Text
    content: Text


class ChatBody(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class EmbeddingsBody(OpenAIBody):
    input: TextOrTexts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, ge=1)
