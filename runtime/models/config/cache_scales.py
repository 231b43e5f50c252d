"""--quantization-param-path: the scales of a cache of 8 bits, as a JSON file. Torch-free.

    {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.02, "1": 0.03}}}}

`dtype` is that of the cache, float8_e4m3fn or int8. `scaling_factor` has for each rank (of tensor
parallelism) and layer one scale, of keys and values.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.regular_file import read_regular


class _Cache(Struct):
    dtype: str
    scaling_factor: dict[int, dict[int, float]]


class _File(Struct):
    kv_cache: _Cache


# dtype of a cache -> what files call it
NAMES = {"fp8_e4m3": ("float8_e4m3fn", "float8_e4m3"), "int8": ("int8",)}


def read_cache_scales(
    path: str, num_ranks: int, num_layers: int, kv_dtype: str = "fp8_e4m3"
) -> tuple[tuple[float, ...], ...]:
    """For each rank, the scale of each layer. Raises ModelError for a file of another form, for a cache of
    another dtype, another number of ranks or layers, or scales that are not positive."""
    try:
        cache = msgspec.json.decode(read_regular(Path(path)), type=_File, strict=False).kv_cache
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
        raise ModelError(
            f"--quantization-param-path {path} cannot be read: {error}; give a JSON file with "
            "kv_cache.scaling_factor, or leave it out"
        ) from None
    if cache.dtype not in NAMES[kv_dtype]:
        raise ModelError(
            f"--quantization-param-path {path} is for {cache.dtype}, not for {NAMES[kv_dtype][0]}"
        )
    ranks, layers = set(range(num_ranks)), set(range(num_layers))
    if set(cache.scaling_factor) != ranks or any(set(one) != layers for one in cache.scaling_factor.values()):
        raise ModelError(
            f"--quantization-param-path {path} has not one scale for each of {num_layers} layers on each of "
            f"{num_ranks} ranks; make it for this model and --tp-size"
        )
    found = tuple(tuple(cache.scaling_factor[rank][i] for i in sorted(layers)) for rank in sorted(ranks))
    if not all(0 < scale < float("inf") for one in found for scale in one):
        raise ModelError(f"--quantization-param-path {path} has a scale that is not a positive number")
    return found
