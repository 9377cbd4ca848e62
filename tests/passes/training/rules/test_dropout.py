"""Dropout draws the same numbers forward and backward."""

from __future__ import annotations

import numpy as np
from tvm import relax

from hybridc.passes.training.differentiate import SEED, differentiate
from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import compiled, normal, program_of, side_by_side

op = relax.op
VALUES = {"w": np.ones((40, 50))}


def _build(emitter: Emitter, w: relax.Var) -> relax.Expr:
    """Two layers of equal shape."""
    first = emitter.item(emitter.emit(op.nn.dropout(w, 0.3)), 0)
    second = emitter.item(emitter.emit(op.nn.dropout(w, 0.3)), 0)
    return side_by_side([first, second], emitter)


def test_the_gradient_has_the_forward_passs_mask() -> None:
    program = program_of(_build, VALUES)
    made = differentiate(program, ["w"])
    assert made.has_seed and made.program.main.params[1].name == SEED
    _, kept, gradient = compiled(made.program)({**VALUES, SEED: np.array(7)})
    weights = program.weights["weights"]
    np.testing.assert_allclose(gradient, (kept * weights).reshape(2, 40, 50).sum(0), rtol=1e-12)


def test_masks_depend_on_seed_layer_and_position_and_on_nothing_else() -> None:
    run = compiled(differentiate(program_of(_build, VALUES), ["w"]).program)
    masks = [
        part > 0
        for seed in (1, 1, 2, 1 + 2**32)
        for part in run({**VALUES, SEED: np.array(seed)})[1].reshape(2, 40, 50)
    ]
    assert (masks[0] == masks[2]).all() and (masks[1] == masks[3]).all()
    different = [masks[i] for i in (0, 1, 4, 5, 6, 7)]
    for i, mask in enumerate(different):
        assert abs(mask.mean() - 0.7) < 0.04  # 4 standard deviations of 2,000 draws
        for other in different[:i]:
            assert abs((mask == other).mean() - 0.58) < 0.045  # independent: 0.7**2 + 0.3**2
        assert abs((mask[:, 1:] == mask[:, :-1]).mean() - 0.58) < 0.045


def test_kept_elements_make_up_for_the_dropped() -> None:
    kept = compiled(differentiate(program_of(_build, VALUES), ["w"]).program)({**VALUES, SEED: np.array(3)})[
        1
    ]
    np.testing.assert_allclose(np.unique(kept), [0, 1 / 0.7])


def test_rate_0_drops_nothing() -> None:
    def build(emitter: Emitter, w: relax.Var) -> relax.Expr:
        return emitter.item(emitter.emit(op.nn.dropout(w, 0.0)), 0)

    made = differentiate(program_of(build, {"w": normal(0, 3)}), ["w"])
    run = compiled(made.program)
    seed = {SEED: np.array(0)} if made.has_seed else {}
    np.testing.assert_array_equal(run({"w": normal(0, 3), **seed})[1], normal(0, 3))
