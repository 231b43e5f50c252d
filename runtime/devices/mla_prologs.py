"""Interface of fused operators for what precedes latent attention. Torch-free at run time."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from runtime.layers.attention.mla_prolog import PlainProlog, Prolog


class MlaPrologs(Protocol):
    """Fused operators for what precedes latent attention (layers/attention/mla_prolog.py)."""

    def open(self, plain: "PlainProlog") -> "Prolog":
        """The prolog of one layer, or `plain` itself. Raises ModelError."""
        ...
