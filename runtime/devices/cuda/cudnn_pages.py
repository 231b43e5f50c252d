"""cuDNN's attention over pages by its graphs: the package nvidia-cudnn-frontend, written by the source of
1.23.0.

A graph is built for sizes: a number of rows, the longest of them, the width of the page table, and what a
layer has. Lengths of rows, and where their queries begin, are tensors; rows of no queries and no keys are
documented to be skipped. Building one takes as long as cuDNN takes to compile it, so the sizes are few
(GraphSizes), and all of them are built before a server takes its first request.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime import log
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.cuda.kv_ranges import page_table_of
from runtime.layers.upload import upload

OLDEST = 91002  # cuDNN 9.10.2: pages with packed queries and heads beyond 128, and no 9.10.0, which is wrong
OLDEST_AMPERE = 91801  # packed queries before compute capability 9
FACTOR = 4  # between sizes that graphs are built for
LEAST_QUERIES = 64  # of the longest row
LEAST_KEYS = 1024  # of a page table
PACKAGE = "nvidia-cudnn-frontend"


class Shape(NamedTuple):
    """What a graph is built for."""

    rows: int
    longest: int  # the most queries that a row may have
    width: int  # pages of a row


class Kind(NamedTuple):
    """What layers have that share graphs."""

    heads: int  # of queries
    keys: tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of pages [pages, K, page_size, D]
    values: tuple[tuple[int, ...], tuple[int, ...]]
    scale: float

    @classmethod
    def of(cls, heads: int, keys: Tensor, values: Tensor, scale: float) -> "Kind":
        """Layers over pages [pages, page_size, K, D]."""
        layouts = ((tuple(x.shape), x.stride()) for x in (keys.transpose(1, 2), values.transpose(1, 2)))
        return cls(heads, *layouts, scale)


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The closed set of sizes that steps have, by the largest step: powers of FACTOR, and the most."""

    most_rows: int = 256
    most_tokens: int = 8192  # of a step
    most_keys: int = 1 << 17  # of a row

    def all_longest(self) -> list[int]:
        """The sizes of the longest row."""
        return sizes(LEAST_QUERIES, self.most_tokens)

    def longest(self, count: int) -> int:
        """The size for a row of so many queries."""
        return at_least(count, LEAST_QUERIES, self.most_tokens)

    def width(self, length: int, page_size: int) -> int:
        """Pages of a table for rows of so many keys."""
        return at_least(-(-length // page_size), *self._widths(page_size))

    def batches(self, counts: np.ndarray) -> Iterator[tuple[slice, int, int]]:
        """Rows of `counts` queries by the calls that compute them: which, and the rows and the longest row
        that the graph has. Rows of a call are not as many that most of what its graph is for is padding."""
        first = 0
        while first < len(counts):
            end, rows, longest = first + 1, 1, self.longest(int(counts[first]))
            while end < len(counts):
                more = at_least(end + 1 - first, 1, self.most_rows)
                longer = max(longest, self.longest(int(counts[end])))
                if more * longer > self.most_tokens:
                    break
                end, rows, longest = end + 1, more, longer
            yield slice(first, end), rows, longest
            first = end

    def shapes(self, page_size: int) -> Iterator[Shape]:
        """All that `batches` and `width` find between them."""
        for rows in sizes(1, self.most_rows):
            for longest in self.all_longest():
                if rows == 1 or rows * longest <= self.most_tokens:
                    for width in sizes(*self._widths(page_size)):
                        if holds(longest, width * page_size):
                            yield Shape(rows, longest, width)

    def _widths(self, page_size: int) -> tuple[int, int]:
        return -(-LEAST_KEYS // page_size), -(-self.most_keys // page_size)


USUAL_SIZES = GraphSizes()


def sizes(least: int, most: int) -> list[int]:
    """The sizes up to `most`."""
    found = []
    while least < most:
        found.append(least)
        least *= FACTOR
    return [*found, most]


def at_least(count: int, least: int, most: int) -> int:
    """The smallest size for so many."""
    return next(size for size in sizes(least, most) if size >= count)


def holds(longest: int, num_keys: int) -> bool:
    """Whether the longest row of a graph can be in so many keys: it has more queries than the next smaller
    size."""
    return longest <= LEAST_QUERIES or longest // FACTOR < num_keys


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows of queries that stand one behind the other, of one call; the last query of a row sees all of its
    keys. Behind them are rows of nothing."""

    queries: slice  # of the step's prompts
    shape: Shape
    table: Tensor  # int32 [R, 1, width, 1]
    lengths: Tensor  # int32 [R, 1, 1, 1]: keys
    counts: Tensor  # int32 [R, 1, 1, 1]: queries
    ends: Tensor  # int64 [R + 1, 1, 1, 1]: where each row's queries begin

    @classmethod
    def of(
        cls, plan: AttentionRows, page_tables: Tensor, page_size: int, graph_sizes: GraphSizes
    ) -> "list[PagedRows]":
        """The rows of a step's prompts, in pages of the first pool."""
        found, begin = [], 0
        for some, rows, longest in graph_sizes.batches(plan.counts):
            part = AttentionRows(0, plan.slots[some], plan.starts[some], plan.counts[some])
            table, _ = page_table_of(part, page_tables[0], page_size, 0)
            width = graph_sizes.width(int((part.starts + part.counts).max()), page_size)
            end = begin + int(part.counts.sum())
            shape = Shape(rows, longest, width)
            found.append(cls.padded(slice(begin, end), shape, table, part.starts, part.counts))
            begin = end
        return found

    @classmethod
    def padded(
        cls, queries: slice, shape: Shape, table: Tensor, starts: np.ndarray, counts: np.ndarray
    ) -> "PagedRows":
        """Rows whose pages are in a table [rows, pages], filled up to a shape."""
        behind = shape.rows - len(counts)
        table = pad(table, (0, shape.width - table.shape[1], 0, behind))
        lengths, all_counts = (np.pad(x.astype(np.int32), (0, behind)) for x in (starts + counts, counts))
        ends = np.concatenate(([0], all_counts.cumsum(dtype=np.int64)))
        there = [four(upload(x, table.device)) for x in (lengths, all_counts, ends)]
        return cls(queries, shape, table.view(shape.rows, 1, shape.width, 1), *there)


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
        self.dtype = kinds.HALF if dtype == torch.float16 else kinds.BFLOAT16
        self.handle = cudnn.create_handle()
        self.graphs: dict[tuple[Kind, Shape], SdpaGraph | None] = {}  # None: cuDNN has no kernel for them

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, calls: Sequence[PagedRows], scale: float
    ) -> Tensor | None:
        """q [T, H, DK] over pages [pages, page_size, K, DK] and [pages, page_size, K, DV] -> [T, H, DV];
        None: cuDNN has no kernel for these shapes."""
        kind = Kind.of(q.shape[1], keys, values, scale)
        graphs = [self.graph_of(kind, rows.shape) for rows in calls]
        q, out = q.contiguous(), q.new_empty(*q.shape[:2], values.shape[3])
        if q.is_cuda:
            stream = torch.cuda.current_stream(q.device).cuda_stream
            self.cudnn.set_stream(handle=self.handle, stream=stream)
        for graph, rows in zip(graphs, calls, strict=True):
            if graph is None:
                return None
            given = {
                "q": q[rows.queries],
                "k": keys.transpose(1, 2),
                "v": values.transpose(1, 2),
                "k_table": rows.table,
                "v_table": rows.table,
                "counts": rows.counts,
                "lengths": rows.lengths,
                "q_ends": rows.ends * (q.shape[1] * q.shape[2]),
                "out_ends": rows.ends * (q.shape[1] * out.shape[2]),
                "out": out[rows.queries],
            }
            workspace = torch.empty(max(graph.workspace_bytes, 1), dtype=torch.uint8, device=q.device)
            pack = {graph.tensors[name]: x for name, x in given.items()}
            graph.graph.execute(pack, workspace, handle=self.handle)
        return out

    def graph_of(self, kind: Kind, shape: Shape) -> SdpaGraph | None:
        """The graph of these layers and sizes, which is built where it is not yet; None: cuDNN has none."""
        if (kind, shape) not in self.graphs:
            try:
                self.graphs[kind, shape] = self._build(kind, shape)
            except self.cudnn.cudnnGraphNotSupportedError as error:
                reason = str(error).splitlines()[0] if str(error) else "not supported"
                log.get("ranks").warning("cuDNN has no attention over pages for a shape", reason=reason)
                self.graphs[kind, shape] = None
        return self.graphs[kind, shape]

    def _build(self, kind: Kind, shape: Shape) -> SdpaGraph:
        cudnn, kinds = self.cudnn, self.cudnn.data_type
        graph = cudnn.pygraph(
            io_data_type=self.dtype,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self.handle,
        )
        rows, longest, width = shape
        # queries and results are packed: rows begin where the offsets say, and none is as long as this
        packed, packed_out = (packed_layout(shape, kind.heads, x[0][3]) for x in (kind.keys, kind.values))
        table, numbers = ([rows, 1, width, 1], [width, width, 1, 1]), ([rows, 1, 1, 1], [1, 1, 1, 1])
        ends = [rows + 1, 1, 1, 1], [1, 1, 1, 1]
        layouts = {
            "q": (*packed, self.dtype),
            "k": (*map(list, kind.keys), self.dtype),
            "v": (*map(list, kind.values), self.dtype),
            "k_table": (*table, kinds.INT32),
            "v_table": (*table, kinds.INT32),
            "counts": (*numbers, kinds.INT32),
            "lengths": (*numbers, kinds.INT32),
            "q_ends": (*ends, kinds.INT64),
            "out_ends": (*ends, kinds.INT64),
        }
        tensors = {
            name: graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype)
            for name, (dim, stride, dtype) in layouts.items()
        }
        tensors["q"].set_ragged_offset(tensors["q_ends"])
        out, _ = graph.sdpa(
            name="attention",
            q=tensors["q"],
            k=tensors["k"],
            v=tensors["v"],
            generate_stats=False,
            attn_scale=kind.scale,
            use_padding_mask=True,
            seq_len_q=tensors["counts"],
            seq_len_kv=tensors["lengths"],
            use_causal_mask_bottom_right=True,
            paged_attention_k_table=tensors["k_table"],
            paged_attention_v_table=tensors["v_table"],
            paged_attention_max_seq_len_kv=width * kind.keys[0][2],
        )
        dim, stride = packed_out
        out.set_output(True).set_dim(dim).set_stride(stride)
        out.set_ragged_offset(tensors["out_ends"])
        tensors["out"] = out
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        return SdpaGraph(graph, tensors, graph.get_workspace_size())


def packed_layout(shape: Shape, heads: int, dim: int) -> tuple[list[int], list[int]]:
    """Shape and strides of packed rows [T, H, D], as [R, H, longest, D]."""
    return [shape.rows, heads, shape.longest, dim], [shape.longest * heads * dim, dim, heads * dim, 1]


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
