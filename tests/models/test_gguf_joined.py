"""Parts of tensors that GGUF files have in another form are those of the whole."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from runtime.layers.quantization.ggml_joined import JoinedRows
from runtime.layers.quantization.mxfp4 import dequantized
from runtime.models.config.gguf.container import GgufTensor
from runtime.models.config.gguf.tensors import Form, Source

PATH = "model.gguf"


def joined(form: Form, shape: tuple[int, ...], kind: Type, *values: np.ndarray) -> JoinedRows:
    """A reader of tensors of these numbers, one behind the other in a file."""
    tensors, octets = [], b""
    for value in values:
        data = gguf.quants.quantize(value, kind).tobytes()
        tensors.append(GgufTensor("x", PATH, value.shape, kind.name, len(octets), len(data)))
        octets += data
    source = Source(name="x", tensor=tensors[0], second=(*tensors, None)[1], shape=shape, form=form)
    return JoinedRows(source, {PATH: torch.frombuffer(bytearray(octets), dtype=torch.uint8)})


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def test_latents_of_some_rows() -> None:
    keys, values = numbers(3, 5, 4), numbers(3, 2, 5)
    reader = joined("latent", (18, 5), Type.F32, keys, values)
    whole = np.concatenate((keys.transpose(0, 2, 1), values), axis=1).reshape(18, 5)
    assert reader.get_shape() == [18, 5]
    for rows in (slice(None), slice(6, 12), slice(4, 9), slice(17, 18)):
        assert np.array_equal(reader[rows].numpy(), whole[rows])
        target = torch.empty(len(whole[rows]), 3)
        reader.copy_to(target, (rows, slice(1, 4)))
        assert np.array_equal(target.numpy(), whole[rows, 1:4])


@pytest.mark.parametrize("kind", [Type.F32, Type.F16])
def test_experts_whose_gate_and_up_take_turns(kind: Type) -> None:
    gate, up = (numbers(2, 6, 4).round(1) for _ in range(2))
    up += 1
    reader = joined("stack", (2, 4, 12), kind, gate, up)
    whole = reader[...].numpy()
    assert np.allclose(whole[..., ::2], gate.transpose(0, 2, 1), atol=1e-3)
    assert np.allclose(whole[..., 1::2], up.transpose(0, 2, 1), atol=1e-3)
    index = (slice(None), slice(None), slice(4, 10))
    target = torch.empty(2, 4, 6)
    reader.copy_to(target, index)
    assert np.array_equal(target.numpy(), whole[index])
    biases = joined("bias", (2, 8), kind, gate[:, 0], up[:, 0])[...]
    assert np.allclose(biases[:, ::2], gate[:, 0], atol=1e-3)
    assert np.allclose(biases[:, 1::2], up[:, 0], atol=1e-3)


def test_blocks_of_mxfp4_are_codes_and_exponents() -> None:
    gate, up = numbers(2, 3, 64), 2 * numbers(2, 3, 64)
    codes = joined("codes", (2, 6, 2, 16), Type.MXFP4, gate, up)
    exponents = joined("exponents", (2, 6, 2), Type.MXFP4, gate, up)
    assert codes.get_dtype() == exponents.get_dtype() == "U8"
    index = (slice(None), slice(1, 5), slice(1, 2))
    found = dequantized(codes[index], exponents[index]).numpy()
    read = [gguf.quants.dequantize(gguf.quants.quantize(one, Type.MXFP4), Type.MXFP4) for one in (gate, up)]
    whole = np.stack(read, axis=2).reshape(2, 6, 64)
    assert np.array_equal(found, whole[:, 1:5, 32:])
