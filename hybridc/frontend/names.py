"""Names that are safe in generated code: ONNX allows any text, C and CUDA do not."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_NAME_LENGTH = 64
"""Keeps generated sources and reports readable; ONNX names can be of any length."""

# C++, CUDA and the few macros that generated sources see; Python's, because TVMScript is printed.
_WORDS = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t char8_t
    class co_await co_return co_yield compl concept const const_cast consteval constexpr constinit
    continue decltype default delete do double dynamic_cast else enum explicit export extern false float
    for friend goto if inline int int16_t int32_t int64_t int8_t long mutable namespace new noexcept not
    not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires restrict
    return short signed size_t sizeof static static_assert static_cast struct switch template this
    thread_local throw true try typedef typeid typename uint16_t uint32_t uint64_t uint8_t union unsigned
    using virtual void volatile wchar_t while xor xor_eq half half2 float2 float4 int2 int4 dim3 uint3
    blockIdx blockDim threadIdx gridDim warpSize main NULL NAN INFINITY EOF stdin stdout stderr errno
    False None True as assert async await def del elif except finally from global import in is lambda
    nonlocal pass raise with yield I P R T
"""
_RESERVED = frozenset(_WORDS.split())


def safe_names(names: Iterable[str], taken: Iterable[str] = ()) -> dict[str, str]:
    """A distinct identifier for each distinct name, none of them in `taken`.

    Identifiers match `[A-Za-z_][A-Za-z0-9_]*`, have at most `MAX_NAME_LENGTH` characters and are not
    words of C, CUDA or Python. A name that is safe already is kept, whatever the others are.
    """
    distinct = list(dict.fromkeys(names))
    used = set(taken)
    chosen = {name: name for name in distinct if _is_safe(name) and name not in used}
    used.update(chosen)
    next_suffix: dict[str, int] = {}
    for name in distinct:
        if name not in chosen:
            chosen[name] = _unused(_identifier(name), used, next_suffix)
            used.add(chosen[name])
    return {name: chosen[name] for name in distinct}


def unique_names(names: Iterable[str]) -> list[str]:
    """The names in order, repeated ones made unique by a number."""
    wanted = list(names)
    reserved = set(wanted)
    seen: set[str] = set()
    next_suffix: dict[str, int] = {}
    result = []
    for name in wanted:
        unique = _unused(name, reserved, next_suffix) if name in seen else name
        seen.add(unique)
        reserved.add(unique)
        result.append(unique)
    return result


def _is_safe(name: str) -> bool:
    # Two leading underscores, or one and a capital, belong to the compiler.
    return (
        re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None
        and re.match(r"__|_[A-Z]", name) is None
        and len(name) <= MAX_NAME_LENGTH
        and name not in _RESERVED
    )


def _identifier(name: str) -> str:
    """A safe identifier that resembles the name, with room for a suffix."""
    plain = re.sub(r"_+", "_", re.sub(r"[^A-Za-z0-9_]", "_", name)).strip("_")[: MAX_NAME_LENGTH - 8]
    return plain if _is_safe(plain) else f"v_{plain}"


def _unused(base: str, used: set[str], next_suffix: dict[str, int]) -> str:
    """The base, or the base with the first number that makes it new. `next_suffix` keeps it linear."""
    candidate = base
    while candidate in used:
        next_suffix[base] = next_suffix.get(base, 0) + 1
        candidate = f"{base}_{next_suffix[base]}"
    return candidate
