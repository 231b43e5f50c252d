"""How even experts are on ranks, and how long it takes to place them: in order, by DeepSeek's published
algorithm (as the tests have it), and by ours. Of a record of expert counts, which
/dump_expert_distribution_record has written for a model, or of made-up skewed ones of the shape of DeepSeek
V3.

    python -m bench.expert_balance [--record FILE --model-path MODEL] [--ranks 32] [--nodes 4] [--copies 32]
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import numpy as np

from bench.record import record
from runtime.messages.experts import Placement, in_order
from runtime.models.config.expert_location import read_expert_location
from runtime.models.config.model_config import read_config
from runtime.scheduling.expert_balance import balanced, balanced_over_nodes, utilization
from tests.scheduling.test_expert_balance import greedy, published_over_nodes, skewed

LAYERS, EXPERTS, EXPERT_GROUPS = 58, 256, 8  # of DeepSeek V3


def recorded(path: str, folder: str) -> list[np.ndarray]:
    """Tokens by expert, of each layer with experts."""
    moe = read_config(Path(folder)).moe
    assert moe is not None, "--model-path has experts"
    found = read_expert_location(path, moe.layers, moe.num_experts, moe.num_experts)
    assert found.loads is not None, "--record has counts"
    return [np.asarray(found.loads[i], float) for i, is_sparse in enumerate(moe.layers) if is_sparse]


def main() -> None:
    """Runs the bench, prints its figures and records them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record")
    parser.add_argument("--model-path")
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--copies", type=int, default=32)
    args = parser.parse_args()
    if args.record is None:
        layers = [skewed(layer, EXPERTS) for layer in range(LAYERS)]
    else:
        layers = recorded(args.record, args.model_path)
    before = in_order(len(layers[0]), len(layers[0]) + args.copies)
    ways: dict[str, Callable[[np.ndarray], Placement]] = {
        "in order": lambda load: before,
        "published": lambda load: greedy(load, len(before), args.ranks),
        "ours": lambda load: balanced(load, before, args.ranks),
        "published, over nodes": lambda load: published_over_nodes(
            load, len(before), args.ranks, args.nodes, EXPERT_GROUPS
        ),
        "ours, over nodes": lambda load: balanced_over_nodes(
            load, before, args.ranks, args.nodes, EXPERT_GROUPS
        ),
    }
    rows = []
    for name, place in ways.items():
        begin = time.process_time()
        found: list[Placement] = [place(load) for load in layers]
        seconds = time.process_time() - begin
        even = mean(utilization(load, one, args.ranks) for load, one in zip(layers, found, strict=True))
        rows.append(
            {"way": name, "utilization": round(even, 4), "ms_a_layer": round(seconds / len(layers) * 1e3, 2)}
        )
        print(rows[-1])
    record("expert_balance", {"ranks": args.ranks, "copies": args.copies, "runs": rows})


if __name__ == "__main__":
    main()
