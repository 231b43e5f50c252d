"""Exchange between the stages of a pipeline (messages/stages.py). Torch-free at run time.

Hidden states go from a rank to the one of the same tensor-parallel rank in the stage behind it, sampled
tokens from the last stage to those before it (ranks/pipeline.py).
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class StageLinks(Protocol):
    """Exchange between ranks of the stages of one model. What a rank sends to another arrives in its order;
    hidden states and tokens do not wait for each other. Sending waits for no receiver."""

    def send_hidden(self, hidden: "Tensor") -> None:
        """Sends a tensor to the next stage. It must not be changed afterwards."""
        ...

    def receive_hidden(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "Tensor":
        """The next tensor of the stage before. Waits for it."""
        ...

    def send_tokens(self, tokens: "Tensor", stage: int) -> None:
        """Sends int64 [N] from the last stage to another one. They must not be changed afterwards."""
        ...

    def receive_tokens(self, count: int) -> "Tensor":
        """The next tokens of the last stage, int64 [count]. Waits for them."""
        ...
