"""A double of nvidia-cudnn-frontend 1.23.0 for attention over pages: graphs are held to what its source
checks (sdpa_support_surface.h), and to what cuDNN is given when they are executed; results are computed in
float64."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.devices.cuda.doubles import row

DTYPES = {"HALF": torch.float16, "BFLOAT16": torch.bfloat16, "INT32": torch.int32, "INT64": torch.int64}


class cudnnGraphNotSupportedError(Exception):
    """cuDNN has no kernel."""


class Attributes:
    """A tensor of a graph."""

    def __init__(self, dim: list[int] | None = None, stride: list[int] | None = None, kind: str = "") -> None:
        self.dim, self.stride, self.kind = dim, stride, kind
        self.offsets: Attributes | None = None
        self.is_output = False

    def set_output(self, is_output: bool) -> "Attributes":
        self.is_output = is_output
        return self

    def set_dim(self, dim: list[int]) -> "Attributes":
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> "Attributes":
        self.stride = stride
        return self

    def set_ragged_offset(self, offsets: "Attributes") -> None:
        self.offsets = offsets


class pygraph:
    """A graph of one attention. `refuses`: whether cuDNN has no kernel for given sizes of heads."""

    refuses: Callable[[int, int], bool] = staticmethod(lambda dim, dim_v: False)
    built: list["pygraph"] = []

    def __init__(
        self, io_data_type: str, intermediate_data_type: str, compute_data_type: str, handle: object
    ) -> None:
        assert io_data_type in ("HALF", "BFLOAT16") and intermediate_data_type == compute_data_type == "FLOAT"
        assert handle == "handle"
        self.kind = io_data_type
        self.is_built = False

    def tensor(self, name: str, dim: list[int], stride: list[int], data_type: str) -> Attributes:
        assert name and len(dim) == len(stride) == 4 and data_type in DTYPES
        return Attributes(dim, stride, data_type)

    def sdpa(
        self,
        name: str,
        q: Attributes,
        k: Attributes,
        v: Attributes,
        generate_stats: bool,
        attn_scale: float,
        use_padding_mask: bool,
        seq_len_q: Attributes,
        seq_len_kv: Attributes,
        use_causal_mask_bottom_right: bool,
        paged_attention_k_table: Attributes,
        paged_attention_v_table: Attributes,
        paged_attention_max_seq_len_kv: int,
    ) -> tuple[Attributes, None]:
        assert q.dim and k.dim and v.dim and paged_attention_k_table.dim and not generate_stats
        rows, heads, _, dim = q.dim
        assert heads % k.dim[1] == 0 and k.dim[:3] == v.dim[:3] and k.dim[3] == dim
        assert dim % 8 == v.dim[3] % 8 == 0 and isinstance(attn_scale, float)
        assert use_padding_mask and use_causal_mask_bottom_right and q.offsets is not None
        assert q.kind == k.kind == v.kind == self.kind and q.stride is not None and q.stride[3] == 1
        assert k.stride is not None and v.stride is not None and k.stride[3] == v.stride[3] == 1
        for lengths in (seq_len_q, seq_len_kv):
            assert lengths.dim == [rows, 1, 1, 1] and lengths.kind == "INT32"
        for table in (paged_attention_k_table, paged_attention_v_table):
            assert table.dim is not None and table.dim[:2] == [rows, 1] and table.dim[3] == 1
            assert table.kind == "INT32"
        assert paged_attention_max_seq_len_kv == paged_attention_k_table.dim[2] * k.dim[2]
        self.scale, self.inputs = attn_scale, (q, k, v, seq_len_q, seq_len_kv, paged_attention_k_table)
        self.table_v, self.out = paged_attention_v_table, Attributes(kind=self.kind)
        return self.out, None

    def build(self, heuristics: list[str]) -> None:
        q, _, v = self.inputs[:3]
        assert heuristics == ["A", "FALLBACK"] and self.out.is_output and self.out.offsets is not None
        assert q.dim and v.dim and self.out.dim == [*q.dim[:3], v.dim[3]]
        if self.refuses(q.dim[3], v.dim[3]):
            raise cudnnGraphNotSupportedError("no engine for this\nand more")
        self.is_built = True
        self.built.append(self)

    def get_workspace_size(self) -> int:
        return 0

    def check(self, pack: dict[Attributes, Tensor], workspace: Tensor, handle: object) -> None:
        """What cuDNN is given when the graph is executed."""
        assert self.is_built and handle == "handle" and workspace.dtype == torch.uint8
        q, k, _, counts, lengths, table = self.inputs
        packed = (q, self.out)
        assert q.offsets is not None and self.out.offsets is not None
        wanted = {*self.inputs, self.table_v, self.out, q.offsets, self.out.offsets}
        assert set(pack) == wanted and torch.equal(pack[table], pack[self.table_v])
        for attributes, x in pack.items():
            assert x.dtype == DTYPES[attributes.kind]
            if attributes in packed:
                assert x.is_contiguous() and attributes.dim is not None and x.dim() == 3
                assert [x.shape[1], x.shape[2]] == [attributes.dim[1], attributes.dim[3]]
            else:
                assert list(x.shape) == attributes.dim and list(x.stride()) == attributes.stride
        for count, length in zip(
            pack[counts].flatten().tolist(), pack[lengths].flatten().tolist(), strict=True
        ):
            assert (
                q.dim
                and k.dim
                and 0 <= count <= q.dim[2]
                and count <= length <= pack[table].shape[2] * k.dim[2]
            )
            assert (count == 0) == (length == 0)  # rows of nothing are skipped

    def execute(self, pack: dict[Attributes, Tensor], workspace: Tensor, handle: object) -> None:
        self.check(pack, workspace, handle)
        q, k, v, counts, lengths, table = self.inputs
        assert q.offsets is not None and self.out.offsets is not None and k.dim is not None
        queries, out = pack[q], pack[self.out]
        size = queries.shape[1] * queries.shape[2]
        for index, (count, length) in enumerate(
            zip(pack[counts].flatten().tolist(), pack[lengths].flatten().tolist(), strict=True)
        ):
            if count == 0:
                continue
            first = int(pack[q.offsets][index]) // size
            assert int(pack[self.out.offsets][index]) == first * out.shape[1] * out.shape[2]
            pages = pack[table][index].flatten().long()[: -(-length // k.dim[2])]
            keys, values = (pack[x][pages].transpose(1, 2).flatten(0, 1)[:length] for x in (k, v))
            found, _ = row(queries[first : first + count], keys, values, self.scale, -1, 0.0)
            out[first : first + count] = found.to(out.dtype)


def install(patch: pytest.MonkeyPatch, version: int = 91002) -> None:
    """In place of the package, for a test; cuDNN has this version."""
    module = ModuleType("cudnn")
    vars(module).update(
        pygraph=pygraph,
        data_type=SimpleNamespace(FLOAT="FLOAT", **{name: name for name in DTYPES}),
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
        backend_version=lambda: version,
        create_handle=lambda: "handle",
        set_stream=None,  # there is none without a GPU
        cudnnGraphNotSupportedError=cudnnGraphNotSupportedError,
    )
    patch.setattr(pygraph, "built", [])
    patch.setitem(sys.modules, "cudnn", module)
