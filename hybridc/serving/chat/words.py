"""Text to tokens and back: the tokenizer, and the template that makes one prompt of a chat's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from hybridc.errors import UsageError


@dataclass(frozen=True, slots=True)
class Words:
    """What belongs to a decoder and is not in its artifact."""

    tokenizer: Any
    """`tokenizers.Tokenizer`."""
    template: Any
    """`jinja2.Template` of chats, or None."""
    special: Mapping[str, str]
    """Tokens that the template may name, such as `bos_token`."""
    stop_ids: frozenset[int]
    """Tokens that end what is generated."""

    def encode(self, text: str, *, is_chat: bool = False) -> tuple[int, ...]:
        """Tokens of a text; a template writes special tokens itself."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=not is_chat).ids)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids))
        return text

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of an answer to messages. Raises ValueError for messages that the template refuses."""
        from jinja2 import TemplateError

        try:
            text: str = self.template.render(messages=messages, add_generation_prompt=True, **self.special)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from None
        return text


def read_words(tokenizer: Path, template: Path | None, stop_ids: Sequence[int]) -> Words:
    """The tokenizer, and what lies beside it: `tokenizer_config.json`, `generation_config.json` and
    `chat_template.jinja`, as networks are published. Raises UsageError HC594 or HC595."""
    try:
        import jinja2  # noqa: F401 - for templates
        from tokenizers import Tokenizer
    except ImportError as error:
        what, remedy = f"text needs the package {error.name}", "pip install 'hybridc[serve]'"
        raise UsageError("HC594", what, remedy=remedy) from None
    try:
        read = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # what the package raises has no type of its own
        raise _unreadable(tokenizer, error) from None
    settings = _settings(tokenizer.with_name("tokenizer_config.json"))
    special = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token")}
    ends = _settings(tokenizer.with_name("generation_config.json")).get("eos_token_id", [])
    ends = {*stop_ids, *(ends if isinstance(ends, list) else [ends]), read.token_to_id(special["eos_token"])}
    beside = tokenizer.with_name("chat_template.jinja")
    if template is None and beside.is_file():
        template = beside
    text = settings.get("chat_template") if template is None else _text(template)
    return Words(
        read,
        _template(text, template or tokenizer) if isinstance(text, str) else None,
        special,
        frozenset(each for each in ends if isinstance(each, int)),
    )


def _template(text: str, path: Path) -> Any:
    """Compiled as transformers does it: in a sandbox, since it comes with a network of somebody else."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except TemplateError as error:
        what, remedy = f"the chat template cannot be read: {error}", "give another one by --chat-template"
        raise UsageError("HC595", what, where=str(path), remedy=remedy) from None


def _settings(path: Path) -> dict[str, Any]:
    """What a JSON file has, or nothing if it is not there."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise _unreadable(path, error) from None
    return found if isinstance(found, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UsageError:
    remedy = "give the tokenizer.json that belongs to the model"
    return UsageError("HC595", f"{path.name} cannot be read: {error}", where=str(path), remedy=remedy)


def _content(token: Any) -> str:
    """Of a special token, which is text, or an object that has it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
