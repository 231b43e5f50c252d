"""What the scheduler must know of host memory, and of a decode server's pages, from the plan."""

from runtime.cache.host import HostConfig
from runtime.options.plan import Plan


def host_config(plan: Plan, num_pages: int, num_states: int) -> HostConfig:
    """The host tier of ranks with so many pages and states."""
    return HostConfig(
        num_pages=num_pages,
        num_states=num_states,
        write_policy=_write_policy(plan),
        has_storage=plan.tiers.hicache_storage_backend is not None,
        saves_in_step=plan.disaggregation.disaggregation_mode == "prefill",
    )


def _write_policy(plan: Plan) -> str:
    """When pages are copied to host memory. A server that answers what others have read has their pages there
    already."""
    if plan.disaggregation.disaggregation_mode == "decode":
        if not plan.disaggregation.disaggregation_decode_enable_offload_kvcache:
            return "never"
    return plan.tiers.hicache_write_policy


def reserved_tokens(plan: Plan) -> int:
    """Tokens that are kept free for each running sequence, if it may take them."""
    if plan.disaggregation.disaggregation_mode == "decode":
        return plan.disaggregation.num_reserved_decode_tokens
    return 0
