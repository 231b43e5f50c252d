"""Weights that arrive or change while a server runs, and how files are treated."""

from typing import Annotated as A
from typing import Literal

from runtime.options.declare import Count, Derived, Group, Whole, option, superseded
from runtime.options.facts import MachineFacts


class Weights(Group, frozen=True, kw_only=True):
    """Weight updates and checkpoints"""

    checkpoint_engine_wait_weights_before_ready: A[
        bool,
        option(
            "Stay in loading until a checkpoint engine has delivered the weights.",
            note="requests wait until a POST to /update_weights_from_disk has succeeded; with --load-format "
            "dummy no weights are read before",
        ),
    ] = False
    weight_version: A[
        str,
        option(
            "Version of the weights that the API reports.",
            note="cached prefixes belong to one version, in storage as well",
        ),
    ] = "default"
    custom_weight_loader: A[
        tuple[str, ...] | None,
        option(
            "Python functions that load updated weights, as package.module:function.",
            note="an update whose load_format names one calls it on the ranks with the path of the model; it "
            "yields pairs of name and tensor under the names of the Hugging Face layout",
        ),
    ] = None
    weight_loader_disable_mmap: A[
        bool,
        option(
            "Read safetensors files without mapping them into memory.",
            note="otherwise only a range of columns, which a rank of several may need, is taken from a "
            "mapped file",
        ),
    ] = False
    remote_instance_weight_loader_seed_instance_ip: A[
        str | None,
        option(
            "Address of the server to fetch the model's files from, with --load-format remote_instance.",
            note="any server of this runtime is one: its routes /model_files take its --admin-api-key, which "
            "this server is given too; files are checked by their SHA-256; plain HTTP",
        ),
    ] = None
    remote_instance_weight_loader_seed_instance_service_port: A[
        Count | None, option("HTTP port of the server to fetch the model's files from.")
    ] = None
    remote_instance_weight_loader_send_weights_group_ports: A[
        tuple[Whole, ...] | None,
        superseded(
            "Ports over which that server sends its weights, one a rank.", "they come over its HTTP port."
        ),
    ] = None
    remote_instance_weight_loader_backend: A[
        Literal["transfer_engine", "nccl"],
        superseded("Transport of weights between servers.", "they come over HTTP, as files."),
    ] = "nccl"
    remote_instance_weight_loader_start_seed_via_transfer_engine: A[
        bool,
        superseded(
            "Offer the weights of this server to others through the transfer engine.",
            "every server offers its model's files to those who have its --admin-api-key.",
        ),
    ] = False
    delete_ckpt_after_loading: A[
        bool,
        superseded(
            "Delete the checkpoint's files once they are loaded.",
            "no file of a model is ever deleted: ranks that fail are started again from it; delete the "
            "folder yourself when the server has ended.",
        ),
    ] = False
    enable_memory_saver: A[
        bool,
        option(
            "Let weights and cache be released (sleep) and resumed (wake) while the server runs.",
            note="/release_memory_occupation and /resume_memory_occupation; weights are read again from the "
            "checkpoint",
        ),
    ] = False
    enable_weights_cpu_backup: A[
        bool,
        option("Copy weights to host memory when the device's is released, and back when it is resumed."),
    ] = False
    enable_draft_weights_cpu_backup: A[bool, option("The same for the draft model's weights.")] = False
    decrypted_config_file: A[
        str | None,
        option(
            "File with the decrypted config.json of an encrypted checkpoint.",
            note="read in place of config.json; the weights must be readable as they are",
        ),
    ] = None
    packed_weights_dir: A[
        str,
        option(
            "Folder in which weights that were packed for the CPU's kernels are kept for the next start.",
            note="auto: runtime/weights in $XDG_CACHE_HOME, else in ~/.cache; in a container mount it",
            devices=("cpu",),
        ),
    ] = "auto"
    packed_weights_cache_bytes: A[
        Whole,
        option(
            "Most bytes of these files; the one unused for longest goes first.",
            note="0 keeps none; models of less than 64 MB are not kept",
            devices=("cpu",),
        ),
    ] = 32 * 2**30


def packed_weights_dir(machine: MachineFacts) -> Derived:
    """The user's cache."""
    return Derived(f"{machine.cache_folder}/weights", "the folder of this user's caches")
