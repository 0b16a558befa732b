"""Chat templates: from a list of messages to the prompt of a language model.

A chat template is a Jinja template in the folder of a model. It is the only part of a model folder that is evaluated,
and it runs in Jinja's immutable sandbox: it can read the messages and format text, but it reaches no Python function,
attribute with an underscore, file or module, and cannot change its arguments.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from regard.errors import RegardError, require_package

Messages = Sequence[Mapping[str, Any]]
"""messages of a conversation, each with `role` (system, user or assistant) and `content`"""


def render_chat(template: Any, messages: Messages, special_tokens: Mapping[str, str]) -> str:
    """The text of a conversation, ending where the model's answer begins.

    `template` is a Jinja template, or a list of named ones, of which "default" is used. `special_tokens` are variables
    of the template, such as `bos_token`.

    >>> template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{{ eos_token }}"
    >>> render_chat(template, [{"role": "user", "content": "Hello"}], {"eos_token": "</s>"})
    '<user>Hello</s>'
    """
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise RegardError("This model has no chat template.", "Write the prompt as the model expects it, without chat.")
    for i, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RegardError(
                f"Message {i} has no role or no content.", 'For example: {"role": "user", "content": "Hi"}.'
            )
    environment = _environment()
    try:
        compiled = environment.from_string(template)
        return compiled.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )
    except RegardError:
        raise
    except Exception as error:  # a template can raise anything
        raise RegardError(
            f"The chat template of the model failed: {error}.", "Check roles and order of the messages."
        ) from None


@cache
def _environment() -> Any:
    sandbox = require_package("jinja2.sandbox", "chat")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda text: datetime.now().strftime(text)}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise RegardError(f"The chat template of the model refuses the messages: {message}", "Change the messages.")
