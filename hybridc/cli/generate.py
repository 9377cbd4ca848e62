"""Generate text, or tokens, with a compiled decoder.

The likeliest token is taken unless --temperature is given. What is generated goes to standard output as it
comes, tokens a second and memory to standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hybridc
from hybridc.cli.support.arguments import (
    add_emulated_gpu,
    add_host_memory,
    add_json,
    add_plan_memory,
    add_threads,
    add_trust,
    parse_ids,
)
from hybridc.cli.support.files import existing_artifact, existing_file, print_json, written_whole
from hybridc.errors import UsageError
from hybridc.options import format_bytes, parse_count, parse_seed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hybridc.generation import GenerationSession
    from hybridc.generation.text import TextStream

HELP = "generate text with a compiled decoder"
EXAMPLE = """\
  hybridc generate llama.hyb --prompt Hello --tokenizer tokenizer.json
  hybridc generate llama.hyb --prompt-ids 1,17,204 --temperature 0.8 --seed 7"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, metavar="OUT.hyb", help="the compiled decoder")
    parser.add_argument("--prompt", metavar="TEXT", help="what to go on from; needs --tokenizer")
    parser.add_argument(
        "--prompt-ids",
        type=parse_ids,
        metavar="1,17,204",
        help="token ids to go on from, instead of --prompt",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE.json", help="tokenizer of the package tokenizers"
    )
    parser.add_argument(
        "--max-tokens", type=parse_count, default=128, metavar="N", help="new tokens (default: %(default)s)"
    )
    _add_sampling(parser)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end in front of this text; may be repeated; needs --tokenizer",
    )
    parser.add_argument(
        "--stop-ids", type=parse_ids, default=(), metavar="2,0", help="end with one of these token ids"
    )
    parser.add_argument(
        "--shift",
        type=_first_tokens,
        metavar="N",
        help="go on where the context is full: the first N tokens stay, and the later half of the others is"
        " read again (default: refuse what exceeds the context)",
    )
    parser.add_argument(
        "--prompt-cache",
        type=Path,
        metavar="FILE.npz",
        help="keep keys and values in this file: what of the prompt it begins with is not read again",
    )
    add_emulated_gpu(parser)
    add_threads(parser)
    add_plan_memory(parser)
    add_host_memory(parser)
    add_trust(parser)
    add_json(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how tokens are chosen")
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="what logits are divided by (default: 0, the likeliest token)",
    )
    group.add_argument("--top-k", type=parse_count, metavar="K", help="draw from the K likeliest tokens")
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens that have together this probability",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="draw from tokens with at least this share of the likeliest one's probability",
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="make tokens that were there less likely (default: %(default)g, not at all)",
    )
    group.add_argument(
        "--seed", type=parse_seed, default=0, metavar="N", help="seed of what is drawn (default: %(default)s)"
    )


@dataclass(slots=True)
class _Generated:
    """What came, and when."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = "max-tokens"
    """Why it ended: max-tokens, stop or stop-id."""
    prefill_seconds: float = 0.0
    """Until the first token."""
    decode_seconds: float = 0.0


def execute(arguments: argparse.Namespace) -> int:
    existing_artifact(arguments.artifact)
    tokenizer = _tokenizer(arguments)
    prompt = arguments.prompt_ids
    if tokenizer is not None and arguments.prompt is not None:
        prompt = tokenizer.encode(arguments.prompt).ids
    session = hybridc.load_generation(
        arguments.artifact,
        threads=arguments.threads,
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
        emulate_gpu=arguments.emulate_gpu,
        trusted_keys=arguments.trust,
    )
    with session:
        cached = _cached(session, prompt, arguments.prompt_cache)
        made = _generate(session, prompt[cached:], tokenizer, arguments)
        if arguments.prompt_cache is not None:
            with written_whole(arguments.prompt_cache) as name:
                session.save(name)
        memory = {device.value: dataclasses.asdict(used) for device, used in session.memory().items()}
    report = _report(prompt, cached, made, memory)
    if arguments.json:
        print_json(report)
    else:
        print(flush=True)
        print(_summary(report), file=sys.stderr)
    return 0


def _cached(session: GenerationSession, prompt: Sequence[int], path: Path | None) -> int:
    """Tokens at the beginning of the prompt that need not be read: they are in the file, and now there.

    Raises UsageError HC582.
    """
    if path is None or not path.exists():
        return 0
    session.restore(path)
    # a run needs a token to read
    same = zip(session.sequences[0], prompt[:-1], strict=False)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], same))
    session.rewind(count)
    return count


def _generate(
    session: GenerationSession,
    prompt: Sequence[int],
    tokenizer: Tokenizer | None,
    arguments: argparse.Namespace,
) -> _Generated:
    from hybridc.generation import Sampling

    sampling = Sampling(
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        arguments.min_p,
        arguments.repetition_penalty,
        arguments.seed,
    )
    made, stream, start = _Generated(), _stream(tokenizer, arguments.stop), time.perf_counter()
    steps = session.generate([prompt], arguments.max_tokens, sampling, arguments.stop_ids, arguments.shift)
    for (token,) in steps:
        now, start = time.perf_counter() - start, time.perf_counter()
        if made.ids:
            made.decode_seconds += now
        else:
            made.prefill_seconds = now
        assert token is not None, "the only sequence has ended"
        made.ids.append(token)
        if token in arguments.stop_ids:
            made.reason = "stop-id"
            break
        _show(made, f"{token} " if stream is None else stream.push(token), arguments.json)
        if stream is not None and stream.is_stopped:
            made.reason = "stop"
            break
    if stream is not None:
        _show(made, stream.finish(), arguments.json)
    return made


def _show(made: _Generated, text: str, is_quiet: bool) -> None:
    made.text += text
    if not is_quiet:
        print(text, end="", flush=True)


def _stream(tokenizer: Tokenizer | None, stops: Sequence[str]) -> TextStream | None:
    if tokenizer is None:
        return None
    from hybridc.generation.text import TextStream

    return TextStream(lambda ids: tokenizer.decode(list(ids)), stops)


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer, if one is given. Raises UsageError HC500, HC594 or HC595."""
    if (arguments.prompt is None) == (arguments.prompt_ids is None):
        raise UsageError(
            "HC500", "a prompt is needed, once", remedy="give --prompt TEXT or --prompt-ids 1,2,3"
        )
    if arguments.tokenizer is None:
        if arguments.prompt is not None or arguments.stop:
            what = "--prompt and --stop are text, and there is no --tokenizer"
            raise UsageError(
                "HC500", what, remedy="give --tokenizer tokenizer.json, or --prompt-ids, --stop-ids"
            )
        return None
    path = existing_file(arguments.tokenizer, "tokenizer")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        what, remedy = (
            "text needs the package tokenizers",
            "pip install 'hybridc[generate]', or use --prompt-ids",
        )
        raise UsageError("HC594", what, remedy=remedy) from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # what the package raises has no type of its own
        what = f"the tokenizer cannot be read: {error}"
        remedy = "give the tokenizer.json that belongs to the model"
        raise UsageError("HC595", what, where=str(path), remedy=remedy) from None


def _first_tokens(text: str) -> int:
    """Raises UsageError HC513."""
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise UsageError("HC513", f"invalid number of tokens {text!r}", remedy="write for example 4")
    return int(text)


def _report(prompt: Sequence[int], cached: int, made: _Generated, memory: dict[str, Any]) -> dict[str, Any]:
    def speed(tokens: int, seconds: float) -> dict[str, Any]:
        return {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds if seconds else None}

    return {
        "prompt_ids": list(prompt),
        "ids": made.ids,
        "text": made.text,
        "ended_by": made.reason,
        "cached": cached,
        "prefill": speed(len(prompt) - cached, made.prefill_seconds),
        "decode": speed(len(made.ids) - 1, made.decode_seconds),
        "memory": memory,
    }


def _summary(report: dict[str, Any]) -> str:
    lines = [f"ended by {report['ended_by']} after {len(report['ids'])} tokens"]
    for name in ("prefill", "decode"):
        each = report[name]
        if each["tokens_per_s"]:
            lines.append(f"{name}: {each['tokens']} tokens, {each['tokens_per_s']:.1f} a second")
    for device, used in report["memory"].items():
        if used["planned_bytes"] or used["allocated_bytes"]:
            allocated, weights = (format_bytes(used[f"{n}_bytes"]) for n in ("allocated", "mapped_weight"))
            lines.append(f"{device} memory: {allocated} allocated, {weights} of weights mapped")
    return "\n".join(lines)
