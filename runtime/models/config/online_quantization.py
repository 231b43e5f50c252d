"""Schemes to which a plain checkpoint can be quantized while it is loaded, by the names that ask for them.
Torch-free."""

from runtime.errors import ModelError
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt, Scheme

# --quantization -> scheme
SCHEMES: dict[str, Scheme] = {
    "fp8": Fp8(),
    "w8a8_fp8": Fp8(),
    "w8a8_int8": Int8(),
    "int8": Int8(),
    "int4": PackedInt(bits=4, group_size=32, has_half_scales=True),
    "quark_int4fp8_moe": Fp8(),
}
# --quantization -> scheme of experts, where it is another one
EXPERTS: dict[str, Scheme] = {"quark_int4fp8_moe": PackedInt(bits=4, group_size=32, has_half_scales=True)}
# --torchao-config -> scheme; int4wo-N as well
TORCHAO: dict[str, Scheme] = {
    "int8wo": PackedInt(bits=8, group_size=0),
    "int8dq": Int8(),
    "fp8wo": Fp8(activations="none"),
    "fp8dq-per_row": Fp8(),
}
TORCHAO_GROUPS = (32, 64, 128, 256)
PREFIX = "torchao:"  # of a request that is a value of --torchao-config
NEAREST = {  # --torchao-config that is refused -> why, and what to take
    "fp8dq": "names no granularity; choose fp8dq-per_row",
    "fp8dq-per_tensor": "has one scale for all tokens of a step, so that an answer would depend on its "
    "company; choose fp8dq-per_row",
}


def online_scheme(requested: str) -> Scheme | None:
    """The scheme that a plain checkpoint is quantized to; None: the name means none. Raises ModelError for
    a value of --torchao-config that is none."""
    if not requested.startswith(PREFIX):
        return SCHEMES.get(requested)
    name = requested.removeprefix(PREFIX)
    kind, _, group = name.partition("-")
    if kind == "int4wo" and group.isdigit() and int(group) in TORCHAO_GROUPS:
        return PackedInt(bits=4, group_size=int(group), has_half_scales=True)
    if name in TORCHAO:
        return TORCHAO[name]
    sizes = ", ".join(f"int4wo-{size}" for size in TORCHAO_GROUPS)
    why = NEAREST.get(name, f"is not supported; choose one of {', '.join(TORCHAO)}, {sizes}")
    raise ModelError(f"--torchao-config {name} {why}")
