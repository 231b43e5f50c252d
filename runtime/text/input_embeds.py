"""Prompts as embeddings (input_embeds): checks a client's numbers and makes an array that is safe for the
ranks."""

from hashlib import blake2b

import msgspec
import numpy as np

from runtime.errors import InvalidRequest
from runtime.messages.requests import Embeds, GenerateRequest
from runtime.messages.sampling import Limits

FIELD = "input_embeds"

_row = msgspec.json.Decoder(list[float])


def read_input_embeds(prompt: Embeds, limits: Limits) -> np.ndarray:
    """float32 [tokens, hidden], which also takes the place of the prompt's rows. Raises InvalidRequest."""
    width = limits.hidden_size
    rows = _copy(prompt.rows, width) if isinstance(prompt.rows, np.ndarray) else prompt.rows
    if len(rows) > limits.longest_prompt:  # before it is worked on
        raise InvalidRequest(
            f"{FIELD} has {len(rows)} rows; with at least one token of output the most this server takes is "
            f"{limits.longest_prompt}",
            param=FIELD,
        )
    if prompt.ids is not None and len(prompt.ids) != len(rows):
        raise InvalidRequest(f"{FIELD} has {len(rows)} rows for {len(prompt.ids)} input_ids", param=FIELD)
    if isinstance(rows, np.ndarray):
        array = rows
    else:
        array = np.empty((len(rows), width), np.float32)
        for i, row in enumerate(rows):
            array[i] = _numbers(row, i, width)
    if not np.isfinite(array).all():
        raise InvalidRequest(f"{FIELD} has numbers that are infinite, too large or none", param=FIELD)
    prompt.rows = array
    return array


def _copy(rows: np.ndarray, width: int) -> np.ndarray:
    """A copy, because the caller may go on to use the array for something else."""
    if rows.ndim != 2 or rows.shape[1] != width or rows.dtype.kind not in "fiu":
        raise InvalidRequest(
            f"{FIELD} is of {rows.dtype} {list(rows.shape)}; this model takes numbers [tokens, {width}]",
            param=FIELD,
        )
    with np.errstate(over="ignore"):
        return np.array(rows, np.float32, order="C")


def _numbers(row: object, index: int, width: int) -> np.ndarray:
    try:
        numbers = _row.decode(row) if isinstance(row, msgspec.Raw) else row
        with np.errstate(over="ignore"):
            array = np.asarray(numbers, np.float32)
    except (msgspec.DecodeError, TypeError, ValueError, OverflowError):
        raise InvalidRequest(f"{FIELD}: row {index} is not a list of {width} numbers", param=FIELD) from None
    if array.shape != (width,):
        raise InvalidRequest(
            f"{FIELD}: row {index} has {array.size} numbers; this model takes {width}", param=FIELD
        )
    return array


def check_embeds(request: GenerateRequest, prompt: Embeds) -> None:
    """Raises InvalidRequest for parameters that need token ids."""
    if request.before is not None or request.pools:
        raise InvalidRequest(
            f"{FIELD} goes with single requests for text, not with sessions or vectors", param=FIELD
        )
    if prompt.ids is None and (
        request.params.prompt_logprobs is not None or request.params.repetition_penalty != 1
    ):
        name = "repetition_penalty" if request.params.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest(
            f"{name} needs to know the prompt's tokens; give input_ids with {FIELD}", param=name
        )


def digest(array: np.ndarray) -> str:
    """A hash of the numbers, for the prefix cache: prompts with the same numbers share pages."""
    return blake2b(array.data, digest_size=16).hexdigest()
