"""Serve artifacts by the Open Inference Protocol v2, over HTTP and gRPC, until SIGTERM or Ctrl-C.

Any client of the protocol can ask for results, such as tritonclient. Models are called as the files of their
artifacts. With --gpu-memory several of them take turns in one allocation, as `hybridc group` plans it.

With --tokenizer a decoder is served over HTTP by OpenAI's protocol instead: /v1/chat/completions,
/v1/completions and /v1/models, streamed or not, for any client of it.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import hybridc
from hybridc.cli.support.arguments import (
    add_emulated_gpu,
    add_host_memory,
    add_json,
    add_threads,
    add_trust,
    named_count,
    parse_ids,
)
from hybridc.cli.support.files import existing_artifact, existing_file, print_json
from hybridc.cli.support.terminal import print_text
from hybridc.errors import UsageError
from hybridc.options import check_seconds, parse_bytes, parse_count

if TYPE_CHECKING:
    from hybridc.runtime import Session
    from hybridc.serving.server import Addresses
    from hybridc.serving.settings import Settings

HELP = "serve artifacts over HTTP and gRPC"
EXAMPLE = """\
  hybridc serve resnet.hyb
  hybridc serve resnet.hyb --batch N --queue 128 --host 0.0.0.0
  hybridc serve encoder.hyb unet.hyb decoder.hyb --gpu-memory 4GiB
  hybridc serve llama.hyb --tokenizer tokenizer.json --sequences 8"""


_TEXT = ("chat_template", "sequences", "stop_ids")
"""Options that need a tokenizer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifacts", type=Path, nargs="+", metavar="OUT.hyb", help="the artifacts")
    _add_addresses(parser.add_argument_group("addresses"))
    _add_limits(parser.add_argument_group("limits"))
    _add_batches(parser.add_argument_group("dynamic batching"))
    _add_text(parser.add_argument_group("text"))
    _add_memory(parser)
    add_trust(parser)
    add_json(parser)


def _add_addresses(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="0.0.0.0",
        help="address to listen at; who reaches it may use the models (default: %(default)s, this computer)",
    )
    for protocol, port in (("http", 8080), ("grpc", 8081)):
        group.add_argument(
            f"--{protocol}-port",
            type=_port,
            default=port,
            metavar="PORT",
            help="port, or 0 for any that is free (default: %(default)s)",
        )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--queue",
        type=parse_count,
        default=64,
        metavar="N",
        help="requests of a model that may wait; others are refused (default: %(default)s)",
    )
    group.add_argument(
        "--timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="for which a request may wait for its result (default: %(default)g)",
    )
    group.add_argument(
        "--request-size",
        type=parse_bytes,
        metavar="64MiB",
        help="largest request that is read (default: 64MiB, or what the largest inputs need)",
    )
    group.add_argument(
        "--grace",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="for which requests are still answered after SIGTERM or Ctrl-C (default: %(default)g)",
    )


def _add_batches(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch",
        metavar="N",
        help="open dimension, the first axis of inputs and outputs, whose entries the model computes"
        " independently: waiting requests are joined along it (default: none)",
    )
    group.add_argument(
        "--batch-delay",
        type=_delay,
        default=0.0,
        metavar="SECONDS",
        help="for which a batch that is not full waits for more requests (default: %(default)g)",
    )


def _add_text(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE.json",
        help="tokenizer of the package tokenizers: serve a decoder. What lies beside it counts, too:"
        " tokenizer_config.json, generation_config.json, chat_template.jinja",
    )
    group.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE.jinja",
        help="template of chats (default: the tokenizer's)",
    )
    group.add_argument(
        "--sequences",
        type=parse_count,
        metavar="N",
        help="requests that are answered at a time, each with a cache of its own"
        " (default: as many as a run of the decoder has)",
    )
    group.add_argument(
        "--stop-ids", type=parse_ids, metavar="2,0", help="end with one of these tokens, too (default: none)"
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu-memory",
        type=parse_bytes,
        metavar="4GiB",
        help="GPU memory that all artifacts together never exceed (default: up to the GPU's free memory)",
    )
    parser.add_argument(
        "--runs",
        type=named_count,
        action="append",
        default=[],
        metavar="NAME=20",
        help="of artifacts that share --gpu-memory, how often one runs in each of its turns; may be repeated",
    )
    add_emulated_gpu(parser)
    add_threads(parser)
    add_host_memory(parser)


def execute(arguments: argparse.Namespace) -> int:
    for path in arguments.artifacts:
        existing_artifact(path)
    _check(arguments)
    from hybridc.serving.settings import Settings

    settings = Settings(
        host=arguments.host,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        queue=arguments.queue,
        timeout_s=arguments.timeout,
        request_bytes=arguments.request_size,
        batch=arguments.batch,
        batch_delay_s=arguments.batch_delay,
        grace_s=arguments.grace,
    )
    if arguments.tokenizer is not None:
        _serve_chat(arguments, settings)
        return 0
    from hybridc.serving.server import serve

    with ExitStack() as opened:
        sessions = _load(arguments, opened)
        for session in sessions.values():
            session.warm_up()
        serve(sessions, settings, lambda addresses: _tell(arguments, sessions, addresses))
    return 0


def _serve_chat(arguments: argparse.Namespace, settings: Settings) -> None:
    from hybridc.serving.chat.server import ChatSettings, serve_chat

    existing_file(arguments.tokenizer, "tokenizer")
    if arguments.chat_template is not None:
        existing_file(arguments.chat_template, "chat template")
    (path,) = arguments.artifacts
    with hybridc.load_generation(
        path,
        threads=arguments.threads,
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
        emulate_gpu=arguments.emulate_gpu,
        trusted_keys=arguments.trust,
    ) as session:
        chat = ChatSettings(
            arguments.tokenizer,
            arguments.chat_template,
            arguments.stop_ids or (),
            arguments.sequences or len(session.sequences),
        )
        serve_chat(path.stem, session, settings, chat, lambda address: _tell_chat(arguments, address))


def _check(arguments: argparse.Namespace) -> None:
    """Raises UsageError HC514 or HC500."""
    if arguments.tokenizer is None:
        given = [each for each in _TEXT if getattr(arguments, each) is not None]
        if given:
            what = f"--{given[0].replace('_', '-')} is for a decoder whose text is served"
            raise UsageError("HC500", what, remedy="give --tokenizer tokenizer.json, too")
    elif len(arguments.artifacts) > 1 or arguments.batch is not None:
        what = "with --tokenizer one decoder is served, whose requests are joined as they come"
        raise UsageError("HC500", what, remedy="give one artifact and no --batch")
    names = [path.stem for path in arguments.artifacts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        what = f"two artifacts are called {twice!r}"
        raise UsageError("HC514", what, remedy="give the paths of artifacts whose names differ")
    if arguments.runs and not _shares_memory(arguments):
        remedy = "give several artifacts and --gpu-memory"
        raise UsageError("HC500", "--runs is for artifacts that share GPU memory", remedy=remedy)


def _shares_memory(arguments: argparse.Namespace) -> bool:
    return arguments.gpu_memory is not None and len(arguments.artifacts) > 1


def _load(arguments: argparse.Namespace, opened: ExitStack) -> dict[str, Session]:
    """Sessions by the names of their artifacts, which `opened` closes."""
    common = {
        "threads": arguments.threads,
        "host_memory": arguments.host_memory,
        "emulate_gpu": arguments.emulate_gpu,
        "trusted_keys": arguments.trust,
    }
    if _shares_memory(arguments):
        runs = dict(arguments.runs)
        group = opened.enter_context(
            hybridc.load_group(arguments.artifacts, gpu_memory=arguments.gpu_memory, runs=runs, **common)
        )
        return {name: group[name] for name in group}
    return {
        path.stem: opened.enter_context(hybridc.load(path, gpu_memory=arguments.gpu_memory, **common))
        for path in arguments.artifacts
    }


def _tell_chat(arguments: argparse.Namespace, address: str) -> None:
    name = arguments.artifacts[0].stem
    if arguments.json:
        print_json({"http": address, "models": [name]}, one_line=True)
    else:
        print_text(f"serving {name} at http://{address}/v1")
    print(end="", flush=True)  # whoever has started the server waits for it


def _tell(arguments: argparse.Namespace, sessions: dict[str, Session], addresses: Addresses) -> None:
    if arguments.json:
        told = {"http": addresses.http, "grpc": addresses.grpc, "models": list(sessions)}
        print_json(told, one_line=True)
    else:
        print_text(f"serving {', '.join(sessions)} at http://{addresses.http} and grpc://{addresses.grpc}")
    print(end="", flush=True)  # whoever has started the server waits for it


def _port(text: str) -> int:
    """Raises UsageError HC513."""
    if not text.isdecimal() or int(text) > 65535:
        raise UsageError("HC513", f"invalid port {text!r}", remedy="give a number from 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    """Raises UsageError HC518."""
    try:
        return check_seconds(float(text))
    except ValueError:
        raise UsageError(
            "HC518", f"invalid number of seconds {text!r}", remedy="write for example 0.5"
        ) from None


def _delay(text: str) -> float:
    return 0.0 if text == "0" else _seconds(text)
