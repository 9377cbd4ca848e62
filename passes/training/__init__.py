"""Training: forward pass, backward pass and update of the parameters become an ordinary program."""

from hybridc.passes.training.differentiate import Differentiated, differentiate
from hybridc.passes.training.gradients import Emitter, Reverse

__all__ = ["Differentiated", "Emitter", "Reverse", "differentiate"]
