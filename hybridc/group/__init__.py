"""Several artifacts that take turns in one GPU budget: which weights stay on the GPU, and where all lies.

Pure functions on graphs and plans; `hybridc.runtime.SessionGroup` runs what they plan. Begin with `make.py`.
"""

from hybridc.group.artifacts import candidates, with_turn
from hybridc.group.make import Candidate, GroupPlan, Member, plan_group
from hybridc.group.verify import verify_group

__all__ = ["Candidate", "GroupPlan", "Member", "candidates", "plan_group", "verify_group", "with_turn"]
