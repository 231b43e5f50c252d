"""Hidden states as JSON. Written row by row, so that a thread that writes many leaves the others room in
between."""

import msgspec
import numpy as np

from runtime.http.streaming import sse

Row = msgspec.Raw  # a list of numbers


def written(row: np.ndarray) -> Row:
    return Row(sse.encode(row.tolist()))


def told(parts: list[np.ndarray], *, begins: bool = True) -> list[Row | list[Row]]:
    """In SGLang's form: the prompt's rows as a list of them, then the rows of generated tokens; the prompt's
    are those of the first part where the answer `begins` with it."""
    prompt: list[Row | list[Row]] = [[written(row) for row in part] for part in parts[:begins]]
    return prompt + [written(row) for part in parts[begins:] for row in part]


def last(parts: list[np.ndarray] | None) -> Row | None:
    """What the last token was sampled from; None where there is none."""
    return written(parts[-1][-1]) if parts else None
