"""Which instructions compute what addresses and jumps depend on: a backward slice of a kernel."""

from __future__ import annotations

from hybridc.gpu_model.sass.code import Code, Instruction
from hybridc.gpu_model.sass.operands import ADDRESSED, destinations, is_jump, sources


def relevant(code: Code) -> list[bool]:
    """For each instruction, whether an address or jump may depend on one of its results.

    Registers are live backwards from where they are read, along all paths, until they are written in any case
    (Aho et al., Compilers, 2nd edition, section 9.2.5).
    """
    live: list[set[str]] = [set() for _ in range(len(code) + 1)]
    matters = [False] * len(code)
    changed = True
    while changed:
        changed = False
        for place in range(len(code) - 1, -1, -1):
            instruction = code[place]
            after = set().union(*(live[next_place] for next_place in _successors(instruction, len(code))))
            written = set(destinations(instruction))
            matters[place] = bool(written & after)
            before = after if instruction.predicate else after - written
            before |= _read(instruction, matters[place])
            changed |= before != live[place]
            live[place] = before
    return matters


def _successors(instruction: Instruction, end: int) -> list[int]:
    following = [instruction.index + 1]
    if not is_jump(instruction):
        return following
    target = [] if instruction.target is None else [min(instruction.target, end)]
    conditional = instruction.predicate or (instruction.opcode == "BRA" and len(instruction.operands) > 1)
    return target + following if conditional else target


def _read(instruction: Instruction, matters: bool) -> set[str]:
    """What of the registers an instruction reads is needed."""
    found: set[str] = set()
    if matters or is_jump(instruction):
        found.update(sources(instruction))
    if instruction.opcode in ADDRESSED:
        found.update(sources(instruction, only_addresses=True))
    if matters or is_jump(instruction) or instruction.opcode in ADDRESSED:
        found.add(instruction.predicate.lstrip("!"))
    return found
