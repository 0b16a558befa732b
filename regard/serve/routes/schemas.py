"""Bodies of requests, validated by pydantic; the OpenAPI description shows them."""

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

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


Text = Annotated[str, AfterValidator(check_text)]
ModelName = Annotated[Text | None, Field(description="name of the model; not needed if only one has this task")]

TargetLanguage = Annotated[Text | None, Field(description="target language, for a translator of several")]
SourceLanguage = Annotated[Text | None, Field(description="source language, for a translator that needs it")]


class Body(BaseModel):
    """Base class of the native requests: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")
    model: ModelName = None


class DecodeOptions(BaseModel):
    """Options of the search: see `DecodeConfig`."""

    model_config = ConfigDict(extra="forbid")
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
        return dataclasses.replace(defaults, **self.model_dump(exclude_none=True))


class TranslateBody(Body):
    texts: list[Text]
    to: TargetLanguage = None
    source_language: SourceLanguage = None
    options: DecodeOptions = DecodeOptions()
    prefixes: list[Text] | None = Field(None, description="forced beginning of each translation")
    required: list[Text] | None = Field(None, description="phrases that every translation must contain")
    forbidden: list[Text] | None = Field(None, description="phrases that no translation may contain")
    split: Split = Field("auto", description="lines to split into sentences")
    truncate: bool = False


class GenerateBody(Body):
    prompts: list[Text]
    options: DecodeOptions = DecodeOptions()
    forbidden: list[Text] | None = None
    truncate: bool = False
    stream: bool = Field(False, description="server-sent events, for a single prompt")


class ClassifyBody(Body):
    texts: list[Text | tuple[Text, Text]] | None = Field(None, description="texts or pairs of texts")
    images: list[str] | None = Field(None, description="image files in base64")
    truncate: bool = False


class SegmentBody(Body):
    images: list[str] = Field(description="image files in base64")


class AskedQuestion(BaseModel):
    model_config = ConfigDict(extra="forbid")
    question: Text
    context: Text


class AnswerBody(Body):
    questions: list[AskedQuestion]
    empty: bool = Field(False, description="whether an answer may be empty")


class EmbedBody(Body):
    texts: list[Text]
    truncate: bool = False


class ScoreBody(Body):
    texts: list[Text] | None = Field(None, description="texts to score with a language model")
    pairs: list[tuple[Text, Text]] | None = Field(None, description="source and target, to score with a translator")
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
    q: Text | list[Text]
    source: Text = "auto"
    target: Text
    format: Literal["text", "html"] = "text"
    alternatives: int = Field(0, ge=0)
    api_key: Text | None = None


class DetectBody(BaseModel):
    q: Text
    api_key: Text | None = None


class OpenAIBody(BaseModel):
    """Base class of requests in OpenAI's format: unknown fields are ignored."""

    model: Text
    user: str | None = None


class CompletionBody(OpenAIBody):
    prompt: Text | list[Text]
    max_tokens: int | None = Field(16, ge=1)
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, gt=0, le=1)
    n: int | None = Field(1, ge=1)
    stream: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=1, description="log-probabilities of the generated tokens")
    echo: bool | None = False
    stop: Text | list[Text] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    stream_options: dict[str, Any] | None = None


class ChatMessage(BaseModel):
    role: Text
    content: Text


class ChatBody(OpenAIBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, gt=0, le=1)
    n: int | None = Field(1, ge=1)
    stream: bool | None = False
    stop: Text | list[Text] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    stream_options: dict[str, Any] | None = None


class EmbeddingsBody(OpenAIBody):
    input: Text | list[Text]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, ge=1)
