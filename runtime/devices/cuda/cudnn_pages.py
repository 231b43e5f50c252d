"""cuDNN's attention over pages by its graphs: the package nvidia-cudnn-frontend, written by the source of
1.23.0.

A graph is built for shapes: a number of rows, the longest of them, the width of the page table, and what a
layer has. The longest row and the width are rounded up to powers of two, so that few are built; building one
takes as long as cuDNN takes to compile it. Lengths of rows, and where their queries begin, are tensors.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime import log
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.cuda.kernels.launch import next_power_of_2
from runtime.devices.cuda.kv_ranges import page_table_of
from runtime.layers.upload import upload

OLDEST = 91002  # cuDNN 9.10.2: pages with packed queries and heads beyond 128, and no 9.10.0, which is wrong
OLDEST_AMPERE = 91801  # packed queries before compute capability 9
LEAST_QUERIES = 64  # of the longest row that a graph is built for
PACKAGE = "nvidia-cudnn-frontend"


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows of queries that stand one behind the other; the last query of a row sees all of its keys."""

    table: Tensor  # int32 [R, 1, width, 1], width a power of two
    lengths: Tensor  # int32 [R, 1, 1, 1]: keys
    counts: Tensor  # int32 [R, 1, 1, 1]: queries
    ends: Tensor  # int64 [R + 1, 1, 1, 1]: where each row's queries begin
    longest: int  # queries of a row, as a graph is built for

    @classmethod
    def of(cls, plan: AttentionRows, page_tables: Tensor, page_size: int) -> "PagedRows":
        """The rows of a step's prompts, in pages of the first pool."""
        table, lengths = page_table_of(plan, page_tables[0], page_size, 0)
        width = next_power_of_2(table.shape[1])
        table = pad(table, (0, width - table.shape[1]))
        counts = upload(plan.counts.astype("int32"), table.device)
        ends = pad(counts.long().cumsum(0), (1, 0))
        longest = next_power_of_2(int(plan.counts.max()), LEAST_QUERIES)
        return cls(table.view(len(lengths), 1, width, 1), *map(four, (lengths, counts, ends)), longest)


def four(x: Tensor) -> Tensor:
    """A vector as cuDNN takes it, with four dimensions."""
    return x.view(-1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class SdpaGraph:
    """A built graph, and its tensors by name."""

    graph: Any
    tensors: dict[str, Any]
    workspace_bytes: int


class PagedSdpa:
    """Causal attention in 16 bits over pages of the same dtype."""

    def __init__(self, cudnn: Any, dtype: torch.dtype) -> None:
        """`cudnn`: the module of the package."""
        self.cudnn = cudnn
        kinds = cudnn.data_type
        self.kind = kinds.HALF if dtype == torch.float16 else kinds.BFLOAT16
        self.handle = cudnn.create_handle()
        # by shapes; None: cuDNN has no kernel for them
        self.graphs: dict[tuple[Any, ...], SdpaGraph | None] = {}

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float) -> Tensor | None:
        """q [T, H, DK] over pages [pages, page_size, K, DK] and [pages, page_size, K, DV] -> [T, H, DV];
        None: cuDNN has no kernel for these shapes."""
        q, heads = q.contiguous(), q.shape[1]
        caches = [cache.transpose(1, 2) for cache in (keys, values)]
        out = q.new_empty(*q.shape[:2], values.shape[3])
        given = {
            "q": q,
            "k": caches[0],
            "v": caches[1],
            "k_table": rows.table,
            "v_table": rows.table,
            "counts": rows.counts,
            "lengths": rows.lengths,
            "q_ends": rows.ends * (heads * q.shape[2]),
            "out_ends": rows.ends * (heads * out.shape[2]),
            "out": out,
        }
        built = self._graph_of(given, rows, scale)
        if built is None:
            return None
        if q.is_cuda:
            stream = torch.cuda.current_stream(q.device).cuda_stream
            self.cudnn.set_stream(handle=self.handle, stream=stream)
        workspace = torch.empty(max(built.workspace_bytes, 1), dtype=torch.uint8, device=q.device)
        built.graph.execute(
            {built.tensors[name]: x for name, x in given.items()}, workspace, handle=self.handle
        )
        return out

    def _graph_of(self, given: dict[str, Tensor], rows: PagedRows, scale: float) -> SdpaGraph | None:
        caches = given["k"], given["v"]
        layouts = tuple((tuple(cache.shape), cache.stride()) for cache in caches)
        key = (rows.table.shape, rows.longest, given["q"].shape[1], layouts, scale)
        if key not in self.graphs:
            try:
                self.graphs[key] = self._build(given, rows, scale)
            except self.cudnn.cudnnGraphNotSupportedError as error:
                reason = str(error).splitlines()[0] if str(error) else "not supported"
                log.get("ranks").warning("cuDNN has no attention over pages for a shape", reason=reason)
                self.graphs[key] = None
        return self.graphs[key]

    def _build(self, given: dict[str, Tensor], rows: PagedRows, scale: float) -> SdpaGraph:
        cudnn, kinds = self.cudnn, self.cudnn.data_type
        graph = cudnn.pygraph(
            io_data_type=self.kind,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self.handle,
        )
        integers = {torch.int32: kinds.INT32, torch.int64: kinds.INT64}
        # queries and results are packed: rows begin where the offsets say, and none is as long as this
        packed = {name: self._packed(given[name], rows) for name in ("q", "out")}
        tensors = {}
        for name, x in given.items():
            if name != "out":
                dim, stride = packed.get(name, (list(x.shape), list(x.stride())))
                kind = integers.get(x.dtype, self.kind)
                tensors[name] = graph.tensor(name=name, dim=dim, stride=stride, data_type=kind)
        tensors["q"].set_ragged_offset(tensors["q_ends"])
        out, _ = graph.sdpa(
            name="attention",
            q=tensors["q"],
            k=tensors["k"],
            v=tensors["v"],
            generate_stats=False,
            attn_scale=scale,
            use_padding_mask=True,
            seq_len_q=tensors["counts"],
            seq_len_kv=tensors["lengths"],
            use_causal_mask_bottom_right=True,
            paged_attention_k_table=tensors["k_table"],
            paged_attention_v_table=tensors["v_table"],
            paged_attention_max_seq_len_kv=rows.table.shape[2] * given["k"].shape[2],
        )
        dim, stride = packed["out"]
        out.set_output(True).set_dim(dim).set_stride(stride)
        out.set_ragged_offset(tensors["out_ends"])
        tensors["out"] = out
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        return SdpaGraph(graph, tensors, graph.get_workspace_size())

    def _packed(self, x: Tensor, rows: PagedRows) -> tuple[list[int], list[int]]:
        """Shape and strides of packed rows [T, H, D], as [R, H, longest, D]."""
        _, heads, dim = x.shape
        shape = [len(rows.counts), heads, rows.longest, dim]
        return shape, [rows.longest * heads * dim, dim, heads * dim, 1]


def open_paged_sdpa(dtype: torch.dtype) -> PagedSdpa | None:
    """cuDNN's attention over pages; None, with a line in the log that says why, where it is not to be had:
    torch has cuDNN's kernels, too, for keys that are gathered from their pages."""
    if dtype not in (torch.bfloat16, torch.float16):
        return _say_why("over pages it computes in bfloat16 and float16")
    try:
        import cudnn
    except ImportError as error:
        return _say_why(f"{PACKAGE} is not installed ({error}); pip install {PACKAGE}")
    is_old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)
    oldest, version = OLDEST_AMPERE if is_old else OLDEST, cudnn.backend_version()
    if version < oldest:
        found, wanted = (f"{one // 10000}.{one // 100 % 100}.{one % 100}" for one in (version, oldest))
        return _say_why(f"that needs cuDNN {wanted}, and this is {found}; install a newer nvidia-cudnn")
    return PagedSdpa(cudnn, dtype)


def _say_why(reason: str) -> None:
    log.get("ranks").warning("cudnn gathers keys and values from their pages", reason=reason)
