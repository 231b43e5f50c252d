"""A cluster of Ray in one machine with the application on it, for tests/e2e/test_ray.py.

    python -m tests.e2e.ray_cluster PORT ARGUMENTS MACHINES      # the arguments of runtime.ray.app, as JSON

Each of MACHINES is a daemon of Ray. Prints `ready` when replicas serve at the port, and ends when its
standard input does.
"""

import json
import sys

import ray
from ray import serve
from ray.cluster_utils import Cluster

from runtime.ray import app


def main(port: str, arguments: str, machines: str) -> None:
    """Runs the cluster. Its CPUs are names: a replica asks for some, and this machine may have fewer."""
    size = {"num_cpus": 16, "num_gpus": 0, "object_store_memory": 80 * 2**20}
    cluster = None
    if machines == "1":
        ray.init("local", include_dashboard=False, **size)
    else:
        cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **size})
        for _ in range(int(machines) - 1):
            cluster.add_node(**size)
        ray.init(cluster.address)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
        serve.run(app(json.loads(arguments)), name="llm", route_prefix="/")
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
