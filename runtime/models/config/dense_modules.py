"""Dense modules of sentence-transformers folders: linear layers that a text's vector passes after pooling.
Torch-free."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.sizes import Width
from runtime.regular_file import read_regular

DenseActivation = Literal["none", "tanh", "relu", "gelu", "silu", "sigmoid"]
# by torch's class names
ACTIVATIONS: dict[str, DenseActivation] = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
OWN_INPUT = "sentence_embedding"  # name of what a module reads and writes, where that is the text's vector


class DenseModule(Struct, frozen=True, kw_only=True):
    """activation(x Wᵀ + b). `folder`: where its weights are, below the model's folder."""

    folder: str
    inputs: int
    outputs: int
    has_bias: bool
    activation: DenseActivation


class HfDense(Struct, frozen=True, kw_only=True):
    """config.json of a module."""

    in_features: Width
    out_features: Width
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    use_residual: bool = False
    module_input_name: str = OWN_INPUT
    module_output_name: str | None = None


def read_dense(folder: Path, names: Sequence[str], hidden_size: int) -> tuple[DenseModule, ...]:
    """The modules in `names`, folders below `folder`, in order. Raises ModelError for files that cannot be
    read, and for modules that do something else."""
    found: list[DenseModule] = []
    for name in names:
        path = folder / name / "config.json"
        try:
            raw = msgspec.json.decode(read_regular(path), type=HfDense)
        except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
            raise ModelError(
                f"{name}/config.json cannot be read: {error}; restore it from the model's source"
            ) from None
        inputs = found[-1].outputs if found else hidden_size
        activation = ACTIVATIONS.get(raw.activation_function.rpartition(".")[2])
        others = {
            "use_residual": raw.use_residual,
            f"module_input_name {raw.module_input_name}": raw.module_input_name != OWN_INPUT,
            f"module_output_name {raw.module_output_name}": raw.module_output_name not in (None, OWN_INPUT),
            f"activation_function {raw.activation_function}": activation is None,
        }
        if wrong := [what for what, is_there in others.items() if is_there]:
            raise ModelError(f"{name}/config.json: {wrong[0]} is not supported")
        if raw.in_features != inputs:
            raise ModelError(f"{name}/config.json: in_features {raw.in_features} follow on {inputs} numbers")
        assert activation is not None, "refused above"
        found.append(
            DenseModule(
                folder=name,
                inputs=raw.in_features,
                outputs=raw.out_features,
                has_bias=raw.bias,
                activation=activation,
            )
        )
    return tuple(found)
