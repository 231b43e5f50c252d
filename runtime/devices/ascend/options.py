"""Options that only Ascend NPUs have. Torch-free."""

from msgspec import Struct


class AscendOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """StartRank.device_options of the npu device."""

    base_gpu_id: int = 0  # NPU of rank 0
    gpu_id_step: int = 1  # from a rank's NPU to the next rank's
    mla_prolog: bool = False  # queries and latents of MLA are made in one fused operator
    requires_mla_prolog: bool = True  # False: where that operator cannot be used, plain steps take its place
    nz_cache: bool = False  # pages are stored in FRACTAL_NZ
    int8_index: bool = False  # index keys of sparse MLA are stored in 8 bits
    prefetch_mb: int = 0  # of the next weight, while ranks exchange; 0: none
    batches_copies: bool = False  # pages go to and from host memory where they belong, many by one call
    multi_stream: bool = False  # shared experts are computed on a side stream
    gather_after_q: bool = False  # sequence-parallel tokens are gathered after the first projections of MLA
    sampling_backend: str = "ascend"
    # megabytes of the buffer of the experts' exchange; None: as many as its decode steps need
    exchange_buffer_mb: int | None = None
    soc: str | None = None  # the generation that was planned for, a name of soc.SOCS; None: any
