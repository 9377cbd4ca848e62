"""How finely tensors and batches are divided at most."""

MAX_TILES = 32
"""Of one tensor, and micro-batches of one batch. More would gain little memory and cost a launch each: by
then most of what a kernel holds are weights."""
MAX_CALLS = 4000
"""Of operators on tiles: with more, launches would take longer than running the kernel on a slower device."""
UNREACHABLE_LIMIT_SLACK = 1.2
"""A kernel that exceeds the limit even with the smallest tiles may need this many times the bytes that it
needs then: the last fifth is not worth several times as many launches."""
