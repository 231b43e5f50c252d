"""How the programs of a launch find the last of those that have a part of the same result.

Each adds one to a counter behind what it has stored, and the one that finds all others there resets the
counter, so the next launch begins with zeros. It reads what the others have stored past its own
multiprocessor's cache (".cg"). Parts are added in their order, so results do not depend on which is last.
"""

import triton
import triton.language as tl


@triton.jit
def is_last_program(counter: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Whether all `count` programs of this counter have stored what they had to. Resets the counter."""
    tl.debug_barrier()  # all threads of this program have stored
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if is_last:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    return is_last
