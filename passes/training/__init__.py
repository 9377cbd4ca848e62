"""Training: a step forward, backward and the update of the parameters is a program like any other."""

from hybridc.passes.training.differentiate import Differentiated, differentiate
from hybridc.passes.training.gradients import Emitter, Reverse

__all__ = ["Differentiated", "Emitter", "Reverse", "differentiate"]
