"""What of OpenAI's requests is taken, and what of them is refused by name."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hybridc.errors import UsageError
from hybridc.generation import GenerationSession, Sampling
from hybridc.serving.chat.scheduler import Asked
from hybridc.serving.chat.words import Words

_COMPLETION_TOKENS = 16
"""OpenAI's default of completions; that of chats is all that there is room for."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "tools": ([],),
    "functions": ([],),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
"""Values, beside none, of what would change the answer and is not there."""


class RefusedRequest(Exception):
    """A request that cannot be answered as it is."""

    def __init__(self, text: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.param, self.code = param, code


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(None, ge=0)
    stop: str | list[str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Request):
    """Of `/v1/completions`."""

    prompt: str | list[str] | list[int]


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[_Part] | None = None


class ChatRequest(_Request):
    """Of `/v1/chat/completions`."""

    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


def asked_completion(request: CompletionRequest, words: Words, decoder: GenerationSession) -> Asked:
    """Raises RefusedRequest."""
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        ids = words.encode(prompt)
    else:
        ids = tuple(each for each in prompt if isinstance(each, int))
        if len(ids) != len(prompt):
            raise RefusedRequest("one prompt is answered in a request", "prompt")
    return _asked(request, ids, request.max_tokens or _COMPLETION_TOKENS, words, decoder, "prompt")


def asked_chat(request: ChatRequest, words: Words, decoder: GenerationSession) -> Asked:
    """Raises RefusedRequest."""
    if words.template is None:
        text = "the model has no chat template: start the server with --chat-template, or use /v1/completions"
        raise RefusedRequest(text, "messages")
    messages = [
        {**(each.model_extra or {}), "role": each.role, "content": _text(each)} for each in request.messages
    ]
    try:
        ids = words.encode(words.chat(messages), is_chat=True)
    except ValueError as error:
        raise RefusedRequest(str(error), "messages") from None
    most = request.max_completion_tokens or request.max_tokens or max(1, decoder.context - len(ids))
    return _asked(request, ids, most, words, decoder, "messages")


def _text(message: _Message) -> str | None:
    if isinstance(message.content, list):
        return "".join(part.text for part in message.content)
    return message.content


def _asked(
    request: _Request,
    prompt: tuple[int, ...],
    most: int,
    words: Words,
    decoder: GenerationSession,
    param: str,
) -> Asked:
    for name, value in (request.model_extra or {}).items():
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            raise RefusedRequest(f"{name} is not supported here: leave it out", name)
    if not prompt:
        raise RefusedRequest("the prompt has no token", param)
    wrong = next((each for each in prompt if not 0 <= each < decoder.vocabulary), None)
    if wrong is not None:
        raise RefusedRequest(f"token id {wrong} is not in the model's vocabulary", param)
    if len(prompt) + most > decoder.context:
        text = f"{len(prompt)} tokens of the prompt and {most} new ones exceed the {decoder.context} of the"
        text += " context"
        raise RefusedRequest(text, param, "context_length_exceeded")
    try:
        sampling = Sampling(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=request.top_k,
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        )
    except UsageError as error:
        raise RefusedRequest(f"{error.what}: {error.remedy}") from None
    return Asked(prompt, most, sampling, request.seed, words.stop_ids)
