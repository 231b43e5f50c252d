"""torch.compile for the part of each layer that follows attention, in captured steps.

From one attention to the next a layer consists of GEMMs, a norm and an activation; norms of heads, rotary
embeddings and the cache, which precede attention, are the device's own kernels. All layers are one function
of their weights, so it is compiled once for one row and once for any number, before the server is ready. Only
captured steps run it: each call of a compiled function checks its guards, which costs the host more than the
kernels save, and a replay does not call it.
"""

from typing import TypedDict

import torch

from runtime.devices.base import Device, ForwardBatch
from runtime.errors import StartError
from runtime.models.base import CompiledLayer, PiecewiseModel


class CompileOptions(TypedDict, total=False):
    """Arguments of torch.compile."""

    backend: str
    mode: str


# measures Triton's products beside cuBLAS's
HOW: CompileOptions = {"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}


def compile_layers(
    model: PiecewiseModel, device: Device, dtype: torch.dtype, *, explains: bool
) -> CompiledLayer:
    """DecoderLayer.after_attention of the model's layers, compiled. `explains`: what is compiled anew, and
    where a compiled function is cut, goes to stderr. Raises StartError."""
    # not before it is wanted: it takes seconds, and imports triton
    from torch._dynamo.exc import TorchDynamoException

    if explains:
        torch._logging.set_logs(graph_breaks=True, recompiles=True)
    compiled: CompiledLayer = torch.compile(type(model.layers[0]).after_attention, **HOW)
    nothing = torch.empty(0, dtype=torch.int64, device=device.torch_device)
    batch = ForwardBatch(nothing, nothing, (), [], None)
    try:
        with torch.inference_mode():
            # the second is not one, so numbers of rows are taken for variable from then on
            for size in (1, 2):
                for layer in model.layers:
                    o_proj = layer.self_attn.o_proj
                    attended = torch.zeros(size, o_proj.inputs.size, dtype=dtype, device=device.torch_device)
                    compiled(layer, attended, attended.new_zeros(size, o_proj.size), batch)
    except TorchDynamoException as error:
        reason = str(error).strip().splitlines()
        raise StartError(
            f"torch.compile failed ({reason[0] if reason else type(error).__name__}); leave "
            "--enable-torch-compile and "
            "--piecewise-cuda-graph-compiler inductor out"
        ) from error
    return compiled
