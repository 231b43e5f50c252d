"""Hidden states as JSON, encoded row by row: a thread that encodes many lets other threads run in between."""

import msgspec
import numpy as np

from runtime.http.streaming import sse

Row = msgspec.Raw  # a list of numbers


def row_json(row: np.ndarray) -> Row:
    """One row, [hidden size], as JSON."""
    return Row(sse.encode(row.tolist()))


def as_json(parts: list[np.ndarray], *, begins: bool = True) -> list[Row | list[Row]]:
    """SGLang's form: the prompt's rows as one list, then each generated token's row. With `begins`, the first
    of `parts`, each [tokens, hidden size], is the prompt's."""
    prompt: list[Row | list[Row]] = [[row_json(row) for row in part] for part in parts[:begins]]
    return prompt + [row_json(row) for part in parts[begins:] for row in part]


def last(parts: list[np.ndarray] | None) -> Row | None:
    """The row that the last token was sampled from; None without hidden states."""
    return row_json(parts[-1][-1]) if parts else None
