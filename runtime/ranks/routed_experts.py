"""The experts that a step's tokens were routed to, kept on the device until the step's result takes them.

Every layer with experts writes the choice of its router for all tokens of a step, captured or not; the next
step overwrites it. Layers without experts have zeros, as in SGLang's answers.
"""

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.layers.upload import upload_int64
from runtime.messages.ranks import StartRank
from runtime.messages.steps import StepPlan
from runtime.models.base import Model


class RoutedExperts:
    """Experts of the tokens of the latest step of one rank, which has all of them."""

    def __init__(self, device: Device, model: Model, max_tokens: int) -> None:
        """`max_tokens`: of one step. The model has at least one layer with experts."""
        layers = sparse_layers(model)
        top_k = next(iter(layers.values())).gate.routing.top_k
        shape = len(model.layers), max_tokens, top_k
        self.ids = torch.zeros(shape, dtype=torch.int32, device=device.torch_device)
        self.attach(model)

    @property
    def num_bytes(self) -> int:
        """Device memory of the choices."""
        return self.ids.nbytes

    def attach(self, model: Model) -> None:
        """Makes the layers of a model write, which has the shapes of the one before."""
        for index, layer in sparse_layers(model).items():
            layer.routed = self.ids[index]

    def take(self, plan: StepPlan) -> list[Tensor]:
        """int32 [tokens, layers, top_k] of the tokens that the plan asks for; none where it asks for none. To
        be called after the step's forward pass was launched, and before the next one."""
        if plan.routed is None:
            return []
        places = upload_int64(plan.routed, self.ids.device)
        return [self.ids.index_select(1, places).transpose(0, 1).contiguous()]


def sparse_layers(model: Model) -> dict[int, SparseFeedForward]:
    """The mixture-of-experts layers of a model, by their index."""
    mlps = {i: getattr(layer, "mlp", None) for i, layer in enumerate(model.layers)}
    return {i: mlp for i, mlp in mlps.items() if isinstance(mlp, SparseFeedForward)}


def open_routed(device: Device, model: Model, start: StartRank) -> RoutedExperts | None:
    """Keeps the experts of tokens; None: no request may ask for them."""
    if not start.reports_experts:
        return None
    return RoutedExperts(device, model, start.max_step_tokens + start.max_slots)
