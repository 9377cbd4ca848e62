"""OpenAI's own client against a server of a decoder: what onnxruntime generates is generated."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.decoders import CONTEXT, VOCABULARY, greedy, llama
from tests.support.serving import Server, needs_kserve

openai = pytest.importorskip("openai")

pytestmark = [needs_kserve, pytest.mark.isa("avx2")]

TURNS = 20


def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)


def text(ids: Any) -> str:
    return " ".join(f"w{i}" for i in ids)


@functools.cache
def expected(prompt: tuple[int, ...], count: int) -> list[int]:
    """The likeliest tokens, by onnxruntime."""
    return list(islice(greedy(llama(int4=False), prompt, in_places=True), count))


def test_a_chat_of_many_turns(server: Server) -> None:
    messages: list[dict[str, str]] = []
    ids: list[int] = []
    for turn in range(TURNS):
        asked = [(7 * turn + 3) % VOCABULARY, (11 * turn + 5) % VOCABULARY]
        messages.append({"role": "user", "content": text(asked)})
        ids += [1, *asked]
        wanted = expected((*ids, 2), 4)
        answer = client(server).chat.completions.create(
            model=server.models[0], messages=messages, temperature=0, max_tokens=4
        )
        assert answer.choices[0].message.content == text(wanted)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens == len(ids) + 1 and answer.usage.completion_tokens == 4
        # the beginning of the prompt is that of the turn before
        assert answer.usage.prompt_tokens_details.cached_tokens >= (len(ids) - 7 if turn else 0)
        messages.append({"role": "assistant", "content": text(wanted)})
        ids += wanted


def test_many_at_once(server: Server) -> None:
    prompts = [(5 + i, 17 * i % VOCABULARY, 3)[: 1 + i % 3] for i in range(20)]

    def ask(prompt: tuple[int, ...]) -> str:
        answer = client(server).completions.create(
            model=server.models[0], prompt=list(prompt), temperature=0, max_tokens=24
        )
        return str(answer.choices[0].text)

    with ThreadPoolExecutor(20) as pool:  # of which eight are answered at a time
        answers = list(pool.map(ask, prompts))
    assert answers == [text(expected(prompt, 24)) for prompt in prompts]


def test_streams(server: Server) -> None:
    wanted = expected((9, 8), 12)
    common = {"model": server.models[0], "temperature": 0, "max_tokens": 12, "stream": True}
    chunks = list(client(server).completions.create(prompt=text((9, 8)), **common))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text(wanted)
    assert chunks[-1].choices[0].finish_reason == "length" and len(chunks) > 6
    messages = [{"role": "user", "content": [{"type": "text", "text": "w9"}]}]
    wanted = expected((1, 9, 2), 12)
    chunks = list(
        client(server).chat.completions.create(
            messages=messages, stream_options={"include_usage": True}, **common
        )
    )
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == text(wanted)


def test_stops_and_seeds(server: Server) -> None:
    wanted = expected((4,), 24)
    place = next(i for i in range(3, 24) if wanted[i] not in wanted[:i])
    stop = f" w{wanted[place]}"
    ask = functools.partial(client(server).completions.create, model=server.models[0], prompt=[4])
    answer = ask(temperature=0, max_tokens=24, stop=stop)
    assert text(wanted).startswith(answer.choices[0].text + stop)
    assert answer.choices[0].finish_reason == "stop"
    drawn = [ask(seed=seed, max_tokens=24, extra_body={"top_k": 50}).choices[0].text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_cancelled_streams_free_their_sequences(server: Server) -> None:
    """More of them than there are sequences, each of which could go on for long."""
    for _ in range(12):
        stream = client(server).completions.create(
            model=server.models[0], prompt=[4], temperature=0, max_tokens=CONTEXT - 1, stream=True
        )
        assert next(iter(stream)).choices[0].text
        stream.close()
    answer = client(server).completions.create(
        model=server.models[0], prompt=[5], temperature=0, max_tokens=3
    )
    assert answer.choices[0].text == text(expected((5,), 3))


@pytest.mark.parametrize("requests", [30, pytest.param(150, marks=pytest.mark.slow)])
def test_memory_does_not_grow(server: Server, requests: int) -> None:
    def ask(seed: int) -> None:
        client(server).completions.create(
            model=server.models[0], prompt=[seed % 200], seed=seed, max_tokens=20
        )

    for seed in range(min(requests, 30)):
        ask(seed)
    before = server.resident_bytes()
    for seed in range(requests):
        ask(seed)
    assert server.resident_bytes() - before < 4 << 20


def test_models_and_health(server: Server) -> None:
    (model,) = client(server).models.list().data
    assert model.id == server.models[0] == client(server).models.retrieve(model.id).id
    assert server.request("GET", "/health") == (200, b'{"status":"ok"}')
    assert server.metric("hybridc_memory_bytes", device="cpu") > 0


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        (COMPLETION, b"{", 400, "malformed request"),
        (COMPLETION, {"prompt": "w1"}, 400, "model"),
        (COMPLETION, {"model": "", "prompt": "w1"}, 404, "there is no model 'other'"),
        (COMPLETION, {"prompt": []}, 400, "no token"),
        (COMPLETION, {"prompt": ""}, 400, "no token"),
        (COMPLETION, {"prompt": [VOCABULARY]}, 400, "vocabulary"),
        (COMPLETION, {"prompt": [-1]}, 400, "vocabulary"),
        (COMPLETION, {"prompt": ["w1", "w2"]}, 400, "one prompt"),
        (COMPLETION, {"prompt": [1] * 300}, 400, "exceed the 256 of the context"),
        (COMPLETION, {"prompt": [1], "max_tokens": 256}, 400, "exceed the 256 of the context"),
        (COMPLETION, {"prompt": [1], "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETION, {"prompt": [1], "n": 2}, 400, "n is not supported"),
        (COMPLETION, {"prompt": [1], "logprobs": 3}, 400, "logprobs is not supported"),
        (COMPLETION, {"prompt": [1], "temperature": -1}, 400, "temperature"),
        (COMPLETION, {"prompt": [1], "temperature": "hot"}, 400, "temperature"),
        (COMPLETION, {"prompt": [1], "top_p": 0}, 400, "top-p"),
        (COMPLETION, {"prompt": [1], "seed": -1}, 400, "seed"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"content": "w1"}]}, 400, "role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "w1"}], "tools": [{}]}, 400, "tools"),
        ("/v1/embeddings", {"input": "w1"}, 404, "Not Found"),
    ],
)
def test_what_cannot_be_answered(server: Server, path: str, body: Any, status: int, told: str) -> None:
    if isinstance(body, dict):
        if "'other'" in told:
            body["model"] = "other"
        elif told != "model":
            body = {"model": server.models[0], **body}
        body = json.dumps(body).encode()
    found, answer = server.request("POST", path, body, {"Content-Type": "application/json"})
    error = json.loads(answer)["error"]
    assert found == status and told in error["message"], answer
    assert error["type"] == "invalid_request_error"


def test_a_template_that_refuses_and_the_end_answers_what_was_taken(
    decoders: dict[str, Path], tokenizer: Path, tmp_path: Path
) -> None:
    """Both of one server, as each takes seconds to start; completions have no template."""
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('only users may speak') }}")
    options = ["--tokenizer", str(tokenizer), "--chat-template", str(template)]
    options += ["--stop-ids", str(expected((6,), 1)[0])]
    with Server([decoders["two"]], *options, log=tmp_path / "log") as server:
        with pytest.raises(openai.BadRequestError, match="only users may speak"):
            client(server).chat.completions.create(model="two", messages=[{"role": "tool", "content": "w1"}])
        answer = client(server).completions.create(model="two", prompt=[6], temperature=0)
        assert answer.choices[0].finish_reason == "stop" and answer.choices[0].text == ""
        stream = client(server).completions.create(model="two", prompt=[7], max_tokens=200, stream=True)
        pieces = iter(stream)
        next(pieces)
        server.terminate()
        *_, last = pieces
        assert last.choices[0].finish_reason in ("length", "stop")
        assert server.process.wait(60) == 0
