"""What is said of a plan: by the verifier, and by running it."""

from __future__ import annotations

from hybridc.errors import PlanError
from hybridc.ir import Graph, Plan
from hybridc.ir.verify import verify
from tests.support.simulator import WrongResult, run_adversarially


def is_refused(graph: Graph, plan: Plan) -> bool:
    """Whether the verifier refuses it."""
    try:
        verify(graph, plan)
    except PlanError:
        return True
    return False


def runs_right(graph: Graph, plan: Plan, random_orders: int = 8) -> bool:
    """Whether every order of its steps that the plan permits gives the right result."""
    try:
        run_adversarially(graph, plan, random_orders)
    except WrongResult:
        return False
    return True
