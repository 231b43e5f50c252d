"""Ranks of `runtime serve` that start before the server does: most of a start is Python importing torch in
the ranks, and in the event-loop process importing the server and reading the tokenizer.

    plan ──open_early──► processes import their device ──begin_loading──► they load the model
                         the server is imported, options are checked      the tokenizer is read

The first of them may be there already (actors/early_process.py).

Nothing is loaded before everything was checked but the tokenizer and the templates. Ranks end with the
process where these are refused.
"""

from runtime.actors.child_environment import raise_open_files
from runtime.actors.early_process import EarlyProcess
from runtime.actors.fork_server import open_fork_server
from runtime.actors.rank_processes import RankProcesses
from runtime.messages.ranks import ProcessSetup
from runtime.models.config.model_config import ModelConfig
from runtime.options.plan import Plan


def open_early(plan: Plan, early: EarlyProcess | None = None) -> RankProcesses | None:
    """Starts the processes of the first ranks; None where they need descriptors that are opened later, or
    other nodes. `early`: a process that becomes the first one, where it can. Raises SpawnError."""
    if plan.tiers.enable_hierarchical_cache or plan.parallel.nnodes > 1:
        return None
    raise_open_files()
    parallel = plan.parallel
    setup = ProcessSetup(
        device=parallel.device,
        num_ranks=parallel.num_ranks,
        num_threads=parallel.num_threads,
        environment=plan.rank_environment,
    )
    forks = open_fork_server(parallel.device, parallel.standby_ranks)
    return RankProcesses(setup, 1, imports=True, forks=forks, early=early)


def begin_loading(processes: RankProcesses | None, plan: Plan, model: ModelConfig) -> None:
    """Has ranks that were opened load a model, unless something has to be done before: weights to be
    downloaded or compared with checksums, adapters to be read."""
    from runtime.settings import start_rank  # here, because it imports most of the server

    if processes is None:
        return
    is_here = plan.model.hub_model is None and not plan.model.model_checksum
    if is_here and not plan.lora.enable_lora and not plan.graphs.enable_profile_cuda_graph:
        processes.send(start_rank(plan, model))
