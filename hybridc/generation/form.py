"""Which artifacts are decoders: the names and shapes of what they take and return."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass

import numpy as np

from hybridc.errors import UsageError
from hybridc.runtime import Session
from hybridc.runtime.descriptions import TYPES, NodeArg
from hybridc.runtime.ports import port_dtype

IDS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
LAST = "last_token"
"""Of `--last-logits` (`frontend/inputs/last_logits.py`)."""
PAST, PRESENT = "past_key_values.", "present."
_DTYPES = {f"tensor({TYPES.get(name, name)})": name for name in ("float32", "float16", "bfloat16", "int8")}
"""Of caches, by the name that onnxruntime gives the type."""


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """A decoder whose cache has room for a fixed number of positions.

    Its inputs are `input_ids` [batch, n], `attention_mask`, perhaps `position_ids`, and
    `past_key_values.N.key` and `.value` [batch, heads, positions, depth]; its outputs are `logits`
    [batch, n, vocabulary], and `present.N.key` and `.value`. So onnxruntime-genai and optimum write them.
    With an input `last_token` [batch] logits are [batch, 1, vocabulary]: those of the tokens that it names.
    """

    batch: int
    """Sequences of a run."""
    context: int
    """Positions that there is room for."""
    vocabulary: int
    times_us: Mapping[int, float]
    """Predicted time of a run, by how many new tokens of each sequence it takes."""
    caches: Mapping[str, str]
    """Outputs by the inputs that they replace in the next run."""
    places: Mapping[str, tuple[tuple[int, ...], np.dtype]]
    """Shape and type of each cache."""
    is_appended: bool
    """Whether `present` is the past with the new positions behind it, instead of a cache of the past's shape
    in which they have taken their places (`past_present_share_buffer` of onnxruntime-genai)."""
    has_positions: bool
    has_last_token: bool


def decoder_form(session: Session) -> DecoderForm:
    """What a session's artifact takes and returns. Raises UsageError HC590 if it is no such decoder."""
    inputs = {node.name: node for node in session.get_inputs()}
    outputs = {node.name: node for node in session.get_outputs()}
    caches = {name: PRESENT + name.removeprefix(PAST) for name in inputs if name.startswith(PAST)}
    _check_names(session, inputs, outputs, caches)
    pasts = [inputs[name] for name in caches]
    if any(len(node.shape) != 4 or node.open or node.type not in _DTYPES for node in pasts):
        what = "its past is not of four fixed dimensions, in float32, float16 or bfloat16"
        raise _refused(
            session, what, "give each of its dimensions one size, as in --dim past_sequence_length=1024"
        )
    ids, logits = inputs[IDS], outputs[LOGITS]
    if len(ids.shape) != 2 or 0 in ids.open or len(logits.shape) != 3 or 2 in logits.open:
        raise _refused(session, f"{IDS} is not [batch, tokens] and {LOGITS} [batch, tokens, vocabulary]")
    lengths = {node.shape[2] for node in pasts}
    if len(lengths) != 1 or any(node.shape[0] != ids.shape[0] for node in pasts):
        raise _refused(session, "its pasts differ in batch or length")
    is_appended = _is_appended(session, inputs, outputs, caches)
    (context,) = lengths
    if MASK in inputs and not is_appended and inputs[MASK].shape[-1] != context:
        what = f"{MASK} has {inputs[MASK].shape[-1]} positions, and the past {context}"
        raise _refused(session, what, "give both one size: what the cache has room for")
    return DecoderForm(
        ids.shape[0],
        context,
        logits.shape[2],
        _times(session, ids, inputs[MASK], context if is_appended else None),
        caches,
        {node.name: (tuple(node.shape), port_dtype(_DTYPES[node.type])) for node in pasts},
        is_appended,
        POSITIONS in inputs,
        LAST in inputs,
    )


def _check_names(
    session: Session, inputs: Container[str], outputs: Container[str], caches: Mapping[str, str]
) -> None:
    missing = [name for name in (IDS, MASK) if name not in inputs]
    missing += [name for name in (LOGITS, *caches.values()) if name not in outputs]
    if missing or not caches:
        raise _refused(session, f"it has no {(missing or [f'{PAST}N.key'])[0]!r}")
    known = (IDS, MASK, POSITIONS, LAST, *caches)
    unknown = [node.name for node in session.get_inputs() if node.name not in known]
    if unknown:
        remedy = f"compile it with a value of it, as in --value {unknown[0]}=0, or export it without"
        raise _refused(session, f"its input {unknown[0]!r} is unknown", remedy)


def _times(session: Session, ids: NodeArg, mask: NodeArg, past: int | None) -> dict[int, float]:
    """Predicted times by the number of new tokens, which may be open: so many positions does the mask have
    behind a `past` that they are appended to."""
    name, found = ids.open.get(1), dict[int, float]()
    total = None if past is None else mask.open.get(1)
    known = {each for each in (name, total) if each is not None}
    for bucket in session.buckets():
        if set(bucket.sizes) != known:
            raise _refused(session, "another dimension than the number of new tokens is open")
        totals = bucket.sizes.get(str(total), (mask.shape[-1],))
        for size in bucket.sizes.get(str(name), (ids.shape[1],)):
            if past is None or past + size in totals:
                found[size] = min(bucket.predicted_us, found.get(size, math.inf))
    if not found:
        what = f"{MASK} has not one position for each of the past's {past} and each new token"
        raise _refused(session, what, f"give it so many, as in --dim {total or 'total'}=past+sequence")
    return found


def _is_appended(
    session: Session, inputs: Mapping[str, NodeArg], outputs: Mapping[str, NodeArg], caches: Mapping[str, str]
) -> bool:
    is_same = [inputs[old].shape == outputs[new].shape for old, new in caches.items()]
    if all(is_same):
        return False
    if any(is_same):
        raise _refused(session, "its present is of the past's shape in some layers, and longer in others")
    if POSITIONS not in inputs:
        what = f"its present is longer than the past, and it has no {POSITIONS}"
        raise _refused(session, what, f"export it with the input {POSITIONS}, which say where tokens stand")
    return True


def _refused(session: Session, what: str, remedy: str = "") -> UsageError:
    return UsageError(
        "HC590",
        f"the artifact is not a decoder that can generate: {what}",
        where=str(session.artifact.path),
        remedy=remedy or f"it must have {IDS}, {MASK}, {PAST}N.key/value, {LOGITS} and {PRESENT}N.key/value",
    )
