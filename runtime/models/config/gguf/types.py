"""The types of ggml's tensors. A row of a tensor is a line of blocks, each of a few numbers."""

from msgspec import Struct


class GgmlType(Struct, frozen=True):
    """How a type lies in a file."""

    name: str
    block: int  # numbers of a block
    num_bytes: int  # of a block


TYPES: dict[int, GgmlType] = {
    number: GgmlType(name, block, num_bytes)
    for number, name, block, num_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}
BY_NAME = {kind.name: kind for kind in TYPES.values()}
# types of numbers that are no codes, by the dtype of config.json that holds them without loss
PLAIN = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}
# types of codes that are places in tables, which the package `gguf` has
TABLED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
# types of codes that are read (layers/quantization/ggml.py)
CODED = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "TQ1_0",
    "TQ2_0",
    *TABLED,
)
