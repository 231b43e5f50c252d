"""How requests are spread over replicas."""

from typing import Literal

BalanceMethod = Literal[
    "round_robin", "total_requests", "total_tokens", "prefix_aware", "follow_bootstrap_room"
]
