"""How checkpoints write weights in few bits, tensor by tensor, and what becomes of each as it is read.

    layout      weight                                       scales                     besides
    fp8         weight, float8 [out, in]                     weight_scale(_inv)         input_scale
    compressed  weight, float8 or int8 [out, in]             weight_scale               input_scale, input_zero_point
    packed      weight_packed, int32 [out, in/n]             weight_scale               weight_zero_point, weight_g_idx, weight_shape
    awq         qweight, int32 [in, out/n], shuffled         scales [groups, out]       qzeros
    gptq        qweight, int32 [in/n, out]                   scales [groups, out]       qzeros (less one, but in v2), g_idx
    modelslim   weight, int8 [out, in], or two in a byte     deq_scale or weight_scale  input_scale, input_offset, quant_bias, ...
    online      weight in full                               made from it

n is the number of codes in 32 bits; the first is in the lowest ones, but for the shuffle of awq.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.errors import ModelError
from runtime.layers.weight import FLOATS, Part, Share
from runtime.models.quantization_schemes import Codes, Fp8, Int8, Stored

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place among the eight codes of a word of column 0, 1, ...
Shapes = list[tuple[int, ...]]
INTS = ("I64", "I32", "I16", "I8")
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Piece:
    """What one module of a checkpoint fills: this rank's rows of a weight's tensors."""

    stored: Stored
    tensors: dict[str, Tensor]
    outs: Share
    ins: Share
    group_ids: Tensor  # of the checkpoint, of this rank's columns of scales
    counts_sums: bool
    seen: set[str]  # of all modules that make one weight: what one of them has given for all

    @property
    def rows(self) -> slice:
        return slice(self.outs.start, self.outs.start + self.outs.size)

    @property
    def columns(self) -> slice:
        return slice(self.ins.start, self.ins.start + self.ins.size)

    def part(self, shapes: Shapes, load: "Load", dtypes: tuple[str, ...] = FLOATS, draw: str = "") -> Part:
        """`load` is given this piece and the slice of a file, where the rank has a share of the weight."""
        return Part(
            shapes[0],
            0,
            self.outs,
            0,
            None if self.outs.size == 0 else partial(load, self),
            dtypes,
            tuple(shapes[1:]),
            draw,
        )


@dataclass(frozen=True, slots=True)
class Found:
    """The tensors of a module."""

    parts: dict[str, Part]
    optional: set[str] = field(default_factory=set)  # what some checkpoints leave out


Load = Callable[[Piece, Any], None]


def layout(piece: Piece) -> Found:
    """What the checkpoint has of this piece."""
    return LAYOUTS[piece.stored.layout](piece)


def whole(raw: Any) -> Tensor:
    tensor: Tensor = raw[...]
    return tensor


def load_weight(piece: Piece, raw: Any) -> None:
    piece.tensors["weight"].copy_(raw[piece.rows, piece.columns])


def share_of(piece: Piece, values: Tensor, square: int = 1) -> Tensor:
    """Of values [outputs or squares of them, groups of inputs], those of this rank; a single one, or a column
    of them, is for all."""
    values = (
        values.reshape(1, 1) if values.numel() == 1 else values.unsqueeze(1) if values.dim() == 1 else values
    )
    rows = torch.arange(piece.outs.start, piece.outs.start + piece.outs.size) // square
    return values.index_select(0, rows.clamp_(max=len(values) - 1)).index_select(1, piece.group_ids)


def load_scale(piece: Piece, raw: Any) -> None:
    piece.tensors["scale"].copy_(share_of(piece, whole(raw).float(), piece.stored.square or 1))


def load_scale_turned(piece: Piece, raw: Any) -> None:
    piece.tensors["scale"].copy_(share_of(piece, whole(raw).T.float()))


def load_largest(name: str, piece: Piece, raw: Any) -> None:
    """Weights that are computed as one quantise their input once: by the scale that none of them exceeds."""
    target = piece.tensors[name]
    target.copy_(torch.maximum(target, whole(raw).float().reshape(1).to(target.device)))


def load_equal(name: str, piece: Piece, raw: Any) -> None:
    """What weights that are computed as one must have in common."""
    target, value = piece.tensors[name], whole(raw).reshape(-1)
    value = (value[piece.columns] if name == "order" else value).to(target)
    if name in piece.seen and not torch.equal(target, value):
        raise ModelError(
            f"weights that are computed as one differ in their {name}, which is not supported; quantise them together"
        )
    piece.seen.add(name)
    target.copy_(value)


def load_nothing(piece: Piece, raw: Any) -> None:
    """What follows from the rest."""


def need_zeros(piece: Piece, raw: Any) -> None:
    if whole(raw).any():
        raise ModelError("weights with offsets are not supported here; quantise them symmetrically")


def need_no_bias(piece: Piece, raw: Any) -> None:
    """Some tools write a bias for every module."""
    if whole(raw).any():
        raise ModelError(
            "a quantised module has a bias that config.json does not know of; restore config.json"
        )


def _scales(piece: Piece) -> Shapes:
    outs, square = piece.outs.full, piece.stored.square
    group = getattr(piece.stored.scheme, "group", 0)
    if square:
        return [(-(-outs // square), -(-piece.ins.full // group))]
    if group:
        return [(outs, -(-piece.ins.full // group))]
    return [(outs, 1), (outs,), (1,), (), (1, 1)]


def _plain(piece: Piece) -> Found:
    scheme, full = piece.stored.scheme, [(piece.outs.full, piece.ins.full)]
    parts = {
        "weight": piece.part(full, load_weight, ("F8_E4M3",) if isinstance(scheme, Fp8) else ("I8",)),
        "weight_scale": piece.part(_scales(piece), load_scale, draw="scale"),
    }
    optional = set()
    if not isinstance(scheme, Fp8):
        parts["weight_zero_point"] = piece.part(_scales(piece), need_zeros, (*INTS, *FLOATS))
        optional = {"weight_zero_point"}
    if scheme.activations != "tensor":
        return Found(parts, optional)
    one: Shapes = [(1,), (), (1, 1)]
    if isinstance(scheme, Fp8):
        return Found(
            parts | {"input_scale": piece.part(one, partial(load_largest, "input_scale"), draw="input scale")}
        )
    parts["input_scale"] = piece.part(one, partial(load_equal, "input_scale"), draw="input scale")
    parts["input_zero_point"] = piece.part(
        one, partial(load_equal, "input_offset"), (*INTS, *FLOATS), draw="zero"
    )
    return Found(parts, optional | {"input_zero_point"})


def _codes(piece: Piece) -> tuple[Codes, int, int]:
    """The scheme, codes in a word, and groups of inputs in the checkpoint."""
    scheme = piece.stored.scheme
    assert isinstance(scheme, Codes)
    return scheme, 32 // scheme.bits, -(-piece.ins.full // scheme.group) if scheme.group else 1


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> uint8 [..., n * codes in a word]."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., columns] -> uint8 [..., bytes]."""
    return codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4


def _words(piece: Piece, share: Share, per_word: int) -> slice:
    if share.start % per_word or share.size % per_word:
        raise ModelError(
            f"--tp-size splits a layer's {share.full} into {share.size}, and the checkpoint has {per_word} codes in one word; "
            f"choose one that leaves multiples of {per_word}"
        )
    return slice(share.start // per_word, (share.start + share.size) // per_word)


def load_packed(piece: Piece, raw: Any) -> None:
    scheme, per_word, _ = _codes(piece)
    words: Tensor = raw[piece.rows, _words(piece, piece.ins, per_word)]
    piece.tensors["weight"].copy_(words.contiguous().view(torch.uint8))


def load_gptq(piece: Piece, raw: Any) -> None:
    scheme, per_word, _ = _codes(piece)
    words: Tensor = raw[_words(piece, piece.ins, per_word), piece.rows]
    piece.tensors["weight"].copy_(words.T.contiguous().view(torch.uint8))


def _unshuffled(codes: Tensor) -> Tensor:
    return codes.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2)


def load_awq(piece: Piece, raw: Any) -> None:
    scheme, per_word, _ = _codes(piece)
    words: Tensor = raw[piece.columns, _words(piece, piece.outs, per_word)]
    piece.tensors["weight"].copy_(
        packed(_unshuffled(unpacked(words, scheme.bits)).T.contiguous(), scheme.bits)
    )


def load_zeros(turn: Callable[[Tensor, int], Tensor], piece: Piece, raw: Any) -> None:
    piece.tensors["zeros"].copy_(share_of(piece, turn(whole(raw), _codes(piece)[0].bits)[: piece.outs.full]))


def _packed(piece: Piece) -> Found:
    scheme, per_word, groups = _codes(piece)
    outs, ins = piece.outs.full, piece.ins.full
    parts = {
        "weight_packed": piece.part([(outs, -(-ins // per_word))], load_packed, ("I32",)),
        "weight_scale": piece.part([(outs, groups)], load_scale, draw="scale"),
        "weight_shape": piece.part([(2,)], load_nothing, INTS),
    }
    if scheme.has_zeros:
        turn = partial(load_zeros, lambda words, bits: unpacked(words.T, bits).T)
        parts["weight_zero_point"] = piece.part([(-(-outs // per_word), groups)], turn, ("I32",))
    if scheme.is_ordered:
        parts["weight_g_idx"] = piece.part([(ins,)], partial(load_equal, "order"), INTS, draw="zero")
    return Found(parts, {"weight_shape"})


def _awq(piece: Piece) -> Found:
    scheme, per_word, groups = _codes(piece)
    outs, ins = piece.outs.full, piece.ins.full
    turn = partial(load_zeros, lambda words, bits: _unshuffled(unpacked(words, bits)).T)
    return Found(
        {
            "qweight": piece.part([(ins, outs // per_word)], load_awq, ("I32",)),
            "qzeros": piece.part([(groups, outs // per_word)], turn, ("I32",)),
            "scales": piece.part([(groups, outs)], load_scale_turned, draw="scale"),
        }
    )


def _need_neighbours(piece: Piece, raw: Any) -> None:
    group = getattr(piece.stored.scheme, "group", 0) or piece.ins.full
    if not torch.equal(whole(raw).long(), torch.arange(piece.ins.full) // group):
        raise ModelError(
            "g_idx has groups in an order of their own, but quantization_config has no desc_act; restore config.json"
        )


def _gptq(piece: Piece) -> Found:
    scheme, per_word, groups = _codes(piece)
    outs, ins = piece.outs.full, piece.ins.full
    less = 0 if piece.stored.layout == "gptq_v2" else 1
    turn = partial(load_zeros, lambda words, bits: unpacked(words, bits).T + less)
    order = partial(load_equal, "order") if scheme.is_ordered else _need_neighbours
    return Found(
        {
            "qweight": piece.part([(ins // per_word, outs)], load_gptq, ("I32",)),
            "qzeros": piece.part([(groups, outs // per_word)], turn, ("I32",)),
            "scales": piece.part([(groups, outs)], load_scale_turned, draw="scale"),
            "g_idx": piece.part([(ins,)], order, INTS, draw="zero"),
            "bias": piece.part([(outs,)], need_no_bias),
        },
        {"bias"} if scheme.is_ordered else {"bias", "g_idx"},
    )


def load_sums(piece: Piece, raw: Any) -> None:
    if piece.counts_sums:
        piece.tensors["sums"].copy_(raw[piece.rows])


def load_deq_scale(piece: Piece, raw: Any) -> None:
    """float32, or its bits in the lower half of an int64."""
    values = whole(raw)
    piece.tensors["scale"].copy_(
        share_of(piece, values.int().view(torch.float32) if values.dtype == torch.int64 else values.float())
    )


def load_narrow(piece: Piece, raw: Any) -> None:
    """Codes of four bits as int8, or two outputs in a byte, the first in its lower half."""
    outs = piece.outs
    if raw.get_shape()[0] == outs.full:
        values = raw[piece.rows, piece.columns]
    else:
        octets = raw[_words(piece, outs, 2), piece.columns].contiguous().view(torch.uint8)
        values = torch.stack(((octets & 15), octets >> 4), 1).flatten(0, 1)
    piece.tensors["weight"].copy_(packed((values.view(torch.uint8) + 8) & 15, 4))


def load_product(piece: Piece, raw: Any) -> None:
    """Scales of groups come on top of those of outputs; the product begins as one."""
    scale = piece.tensors["scale"]
    scale.mul_(share_of(piece, whole(raw).float()).to(scale.device))


def _modelslim(piece: Piece) -> Found:
    scheme, outs, ins = piece.stored.scheme, piece.outs.full, piece.ins.full
    column: Shapes = [(outs, 1), (outs,)]
    parts = {"weight_offset": piece.part(column, need_zeros, (*FLOATS, *INTS), draw="zero")}
    optional = {"weight_offset", "bias"}
    if isinstance(scheme, Codes):
        groups = -(-ins // scheme.group) if scheme.group else 0
        if piece.outs.size:
            piece.tensors["scale"].fill_(1)
        flat = replace(piece, group_ids=torch.zeros_like(piece.group_ids))
        parts |= {
            "weight": piece.part([(outs, ins), (outs // 2, ins)], load_narrow, ("I8",)),
            "weight_scale": flat.part(column, load_product, draw="scale"),
            "scale_bias": piece.part([(outs, 1), (outs, 16), (outs,)], load_nothing),
        }
        if groups:
            parts |= {
                "weight_scale_second": piece.part([(outs, groups)], load_product, draw="scale"),
                "weight_offset_second": piece.part(
                    [(outs, groups)], need_zeros, (*FLOATS, *INTS), draw="zero"
                ),
            }
        return Found(parts, optional | {"scale_bias", "weight_offset_second"})
    parts["weight"] = piece.part([(outs, ins)], load_weight, ("I8",))
    if scheme.activations == "token":
        return Found(parts | {"weight_scale": piece.part(column, load_scale, draw="scale")}, optional)
    one: Shapes = [(1,), (), (1, 1)]
    parts |= {
        "weight_scale": piece.part(column, load_nothing, draw="scale"),
        "deq_scale": piece.part([(outs,), (outs, 1)], load_deq_scale, (*FLOATS, "I64"), draw="scale"),
        "quant_bias": piece.part([(outs,)], load_sums, ("I32",)),
        "input_scale": piece.part(one, partial(load_equal, "input_scale"), draw="input scale"),
        "input_offset": piece.part(one, partial(load_equal, "input_offset"), (*FLOATS, *INTS), draw="zero"),
        "bias": piece.part([(outs,)], load_nothing),
    }  # it is in quant_bias
    return Found(parts, optional | {"weight_scale"})


def load_online(piece: Piece, raw: Any) -> None:
    """Scales from whole rows, so that any split gives the same model."""
    values: Tensor = raw[piece.rows, :].float()
    most = FP8_MAX if isinstance(piece.stored.scheme, Fp8) else 127.0
    scale = (values.abs().amax(1, keepdim=True) / most).clamp_(min=1e-12)
    values = (values[:, piece.columns] / scale).clamp_(-most, most)
    piece.tensors["weight"].copy_(values.round_() if isinstance(piece.stored.scheme, Int8) else values)
    piece.tensors["scale"].copy_(scale)


def _online(piece: Piece) -> Found:
    return Found({"weight": piece.part([(piece.outs.full, piece.ins.full)], load_online)})


LAYOUTS: dict[str, Callable[[Piece], Found]] = {
    "fp8": _plain,
    "compressed-tensors": _plain,
    "packed": _packed,
    "awq": _awq,
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "modelslim": _modelslim,
    "online": _online,
}
