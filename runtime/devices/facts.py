"""What is known about a kind of device before one is opened. Torch-free.

Each device's own facts are in devices/<name>/facts.py; options/facts.py reads them from there.
"""

from msgspec import Struct

ANY_K = 1 << 30  # a bound on top_k that excludes nothing


class DeviceFacts(Struct, frozen=True, kw_only=True):
    """Facts for options and for ranks. A rank measures memory itself and reports it in RankReady."""

    name: str
    page_size: int  # tokens; the page size that suits its kernels
    chunk_tokens: int  # prompt tokens that keep it busy for one step without delaying decodes much
    step_ms: int = 0  # that a step with prompts should last at most while sequences decode; 0: no bound
    max_running: int  # number of sequences beyond which a step only gets slower
    memory_fraction: float  # of free memory, for weights and pages
    memory_reason: str  # why it is this fraction
    dtypes: tuple[str, ...]  # dtypes that "auto" may choose, the preferred one first
    attention_backend: str
    tower_attentions: tuple[str, ...] = ("sdpa",)  # of images and sounds, the preferred one first
    sampling_backends: tuple[str, ...]  # the preferred one first
    # sequences of the largest decode step worth capturing; 0: the device has no graphs
    graph_max_running: int
    # steps with prompts are captured as piecewise graphs unless an option speaks against it
    captures_prompts: bool = False
    # a captured step costs less than one that is launched one by one, however much of it is padding
    pads_graphs_freely: bool = False
    # memory of a rank that has imported its libraries and loaded nothing; files are left out, and what it
    # shares with a fork server
    standby_bytes: int = 0
    recurrent_backends: tuple[str, ...] = ("torch_native",)  # of recurrent layers, the preferred one first
    # importing its libraries starts no thread and touches no device, so ranks can be forked afterwards
    forks_ranks: bool = False
    other_dtypes: tuple[str, ...] = ()  # dtypes that it computes in and "auto" never chooses
    page_sizes: tuple[int, ...] = ()  # page sizes that its kernels take; (): any
    latent_page_sizes: tuple[int, ...] = ()  # page sizes of its latent attention; (): as page_sizes
    has_kv_dtypes: bool = True  # False: keys and values are stored in the dtype of the model
    has_int8_kv: bool = False  # heads' keys and values may be stored as int8, with a scale for each layer
    nz_heads: tuple[int, ...] = ()  # sizes of heads whose pages may be stored in NZ, besides latents
    host_copies: tuple[str, ...] = ("direct", "kernel")  # ways to copy pages to and from host memory
    is_numbered: bool = False  # a machine has several, and --base-gpu-id chooses among them
    schemes: tuple[
        str, ...
    ] = ()  # quantization schemes that it multiplies by, of models/config/quantization_schemes.py
    # (largest_k, has_top_p) of SamplingInputs for which Ops.sample can be captured, the most general one last
    captured_samplers: tuple[tuple[int, bool], ...] = ()
    has_score_caps: bool = True  # attention for models that cap their scores
    has_sinks: bool = True  # attention for models whose heads have a logit next to their scores
    # attention with caps or biases is plain torch: as exact, slower, and not captured
    scores_in_torch: bool = False
    has_score_biases: bool = True  # attention for models that add biases of distance to their scores
    # attention of its own kind can be computed in torch (layers/attention/gathered.py): to tokens that an
    # indexer chooses, and within chunks
    gathers_rows: bool = False
    has_indexers: bool = False  # operators for attention to tokens that an indexer chooses
    has_tree_attention: bool = False  # attention to drafts that form trees
    offload_problem: str = ""  # why weights cannot be offloaded to host memory; empty: they can
    has_logits: bool = True  # False: tokens do not come from logits, so no grammar can constrain them
