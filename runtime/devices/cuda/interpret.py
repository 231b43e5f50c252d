"""Kernels on a machine without a GPU: Triton's interpreter. For tests and dry runs of benches; slow.

To be called before anything imports triton, which decides then.
"""

import os
import sys
from typing import Any


def use_interpreter() -> None:
    """Kernels defined from now on run in numpy."""
    assert "triton.language" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", (
        "triton has been imported already"
    )
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang_tensor
    if patch.__module__ == __name__:
        return

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """numpy 2.4 makes no number of an array of one element, as triton 3.6 has bounds of loops."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor
