"""What the configurations of encoders share. Torch-free."""

from runtime.errors import ModelError

KEPT_BYTES = 256 << 20  # of encodings that the ranks keep
NUMBER_BYTES = 4  # of a number in a row, at most
ACTIVATIONS = ("quick_gelu", "gelu", "gelu_pytorch_tanh", "relu", "silu")


def num_kept_rows(size: int) -> int:
    """Rows of `size` numbers that the ranks keep of what was encoded (scheduling/encodings.py)."""
    return KEPT_BYTES // (NUMBER_BYTES * size)


def check_activation(field: str, name: str) -> None:
    """Raises ModelError for an activation that models/vision/activations.py has not."""
    if name not in ACTIVATIONS:
        raise ModelError(
            f"config.json: {field} {name} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
