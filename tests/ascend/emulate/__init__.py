"""torch_npu's operators computed on the host: importing this fills the table."""

from tests.ascend.emulate import attention, cache, linears, norms

__all__ = ["attention", "cache", "linears", "norms"]
