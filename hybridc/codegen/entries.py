"""What the CPU's functions are called by: an entry for each, which says what arguments its code takes.

TVM's checks of a function's arguments are more code than many a kernel, and took a quarter of LLVM's time.
So functions are compiled without them, under names that nothing outside of the library finds. Under its own
name each function is two instructions, which pass its *entry* to one function of the runtime's helper for all
(`runtime/native/entries.h`): that compares number, types and shapes of the arguments with the entry, and
passes them on, behind the numbers that are a member's of its family. An entry is part of the library, as
what TVM compiled was: whatever the other files of an artifact say, it says what the code works on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import tvm_ffi
from tvm import tirx

from hybridc.codegen.families import Family
from hybridc.schedules.padding.skip import skips_padding

_PARTS = 32
"""Of a loop for each thread, where the run decides how much of it there is to do: of so many parts the rows
of a sample out of eight are in several."""
_CALL = """
.text
.globl __tvm_ffi_{name}
.type __tvm_ffi_{name}, @function
__tvm_ffi_{name}:
  leaq .Lentry{number}(%rip), %r8
  jmp hybridc_enter
.size __tvm_ffi_{name}, .-__tvm_ffi_{name}
.hidden __tvm_ffi_{code}
.section .rodata
.Lname{number}: .asciz "{name}"
"""
_END = """
.hidden hybridc_enter
.section .note.GNU-stack, "", @progbits
"""
"""Without the note the stack of a process that loads the library could be executed."""


def with_code_names(alike: Sequence[Family]) -> tuple[Family, ...]:
    """The families, whose functions have names that are no member's."""
    return tuple(_renamed(each) if _name(each) in each.members else each for each in alike)


def _name(family: Family) -> str:
    return str(family.function.attrs["global_symbol"])


def _renamed(family: Family) -> Family:
    function = family.function.with_attr("global_symbol", f"{_name(family)}_code")
    return Family(function, family.members)


def entries_source(alike: Sequence[Family], functions: Mapping[str, tirx.PrimFunc]) -> str:
    """Assembler of the entries of all members of families `with_code_names`; empty if there are none.

    Requires: parameters of `functions` are arrays of known shapes.
    """
    members = [(_name(each), name, numbers) for each in alike for name, numbers in each.members.items()]
    lines = (
        line
        for number, (code, name, numbers) in enumerate(members)
        for line in _entry(number, code, name, numbers, functions[name])
    )
    return "\n".join([*lines, _END]) if members else ""


def _entry(
    number: int, code: str, name: str, numbers: tuple[int, ...], function: tirx.PrimFunc
) -> Iterator[str]:
    """As `Entry` of `runtime/native/entries.h`."""
    yield _CALL.format(number=number, code=code, name=name)
    yield ".balign 8"
    yield f".Lnumbers{number}: {_quads(numbers)}"
    for position, parameter in enumerate(function.params):
        yield f".Lshape{number}_{position}: {_quads(tuple(int(n) for n in parameter.shape))}"
    yield '.section .data.rel.ro, "aw", @progbits'
    yield ".balign 8"
    yield f".Lparameters{number}:"
    for position, parameter in enumerate(function.params):
        dtype = tvm_ffi.dtype(str(parameter.dtype))
        yield f".quad .Lshape{number}_{position}"
        yield f".long {len(parameter.shape)}"
        yield f".byte {dtype.type_code}, {dtype.bits}"
        yield f".short {dtype.lanes}"
    yield f".Lentry{number}: .quad .Lname{number}, __tvm_ffi_{code}, .Lnumbers{number}, .Lparameters{number}"
    yield f".long {len(numbers)}, {len(function.params)}, {_PARTS if skips_padding(function) else 1}, 0"


def _quads(numbers: tuple[int, ...]) -> str:
    return f".quad {', '.join(map(str, numbers))}" if numbers else ""
