"""What must be equal on all nodes of a server: version, options and checkpoint."""

import sys
from hashlib import sha256
from pathlib import Path

from runtime import __version__
from runtime.messages.nodes import Identity
from runtime.models.config.gguf.container import is_gguf
from runtime.models.config.weight_files import weight_files
from runtime.options.plan import Plan
from runtime.options.table import by_name
from runtime.regular_file import open_regular, read_regular

# groups of options that only the event loop uses, on node 0
OF_NODE_0 = ("http", "api", "logs", "observe", "debug")
# options that a node has for itself: its number, its devices and cores, and where its files lie
OF_EACH_NODE = (
    "node_rank",
    "num_threads",
    "numa_node",
    "standby_ranks",
    "base_gpu_id",
    "gpu_id_step",
    "dist_secret_file",
    "dist_timeout",
    "model_path",
    "tokenizer_path",
    "download_dir",
    "decrypted_config_file",
    "packed_weights_dir",
    "packed_weights_cache_bytes",
    "model_checksum",
    "model_loader_extra_config",
    "weight_loader_disable_mmap",
)
NOT_GIVEN = "not given"
SAMPLES = 16  # of each weight file, spread over its length
SAMPLE_BYTES = 4096
HEAD_BYTES = 1 << 20  # of each weight file: the header


def identity_of(plan: Plan) -> Identity:
    """The identity of this node. Reads the beginning and some samples of each weight file. Raises ModelError,
    OSError."""
    return Identity(
        version=__version__,
        byte_order=sys.byteorder,
        num_nodes=plan.parallel.nnodes,
        device=plan.parallel.device,
        options=given_options(plan),
        checkpoint=checkpoint_digest(plan),
    )


def given_options(plan: Plan) -> dict[str, str]:
    """The options that were given and must agree, by name; secrets are left out. What was
    derived may differ: node 0's values count."""
    return {
        name: str(origin.value)
        for name, origin in plan.why.items()
        if name in by_name()
        and origin.source not in ("default", "derived")
        and by_name()[name].group not in OF_NODE_0
        and name not in OF_EACH_NODE
        and not by_name()[name].secret
    }


def differences(ours: Identity, theirs: Identity) -> list[str]:
    """A clause for each thing in which another node differs from this one, node 0."""
    facts: dict[str, tuple[object, object]] = {
        "version of this package": (ours.version, theirs.version),
        "byte order of the machine": (ours.byte_order, theirs.byte_order),
        "--nnodes": (ours.num_nodes, theirs.num_nodes),
        "--device": (ours.device, theirs.device),
    }
    for name in sorted((ours.options.keys() | theirs.options.keys()) & by_name().keys()):
        facts.setdefault(
            by_name()[name].flag, (ours.options.get(name, NOT_GIVEN), theirs.options.get(name, NOT_GIVEN))
        )
    found = [
        f"{what} is {own} on node 0, and {other} there"
        for what, (own, other) in facts.items()
        if own != other
    ]
    if ours.checkpoint != theirs.checkpoint:
        found.append("the files of --model-path are others than on node 0")
    return found


def checkpoint_digest(plan: Plan) -> str:
    """SHA-256 of the model's config.json, and of names, sizes, beginnings and samples of its weight files:
    fine-tunes of one model differ in it, a flipped bit need not (--model-checksum finds that)."""
    folder, found = Path(plan.model.model_path), sha256()
    config = Path(plan.weights.decrypted_config_file or folder / "config.json")
    if not is_gguf(folder) and config.is_file():
        found.update(read_regular(config))
    if plan.model.load_format == "dummy" or plan.parallel.device == "null":
        return found.hexdigest()
    for path in weight_files(folder, plan.model.load_format):
        with open_regular(path) as file:
            size = file.seek(0, 2)
            found.update(f"\0{'' if is_gguf(folder) else path.name}\0{size}\0".encode())
            for sample in range(SAMPLES):
                file.seek(size * sample // SAMPLES)
                found.update(file.read(SAMPLE_BYTES if sample else HEAD_BYTES))
    return found.hexdigest()
