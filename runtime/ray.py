"""Replicas of the engine on a Ray cluster, as an application of Ray Serve.

    serve run runtime.ray:app device=cuda model_path=DIR tensor_parallel_size=2 max_replicas=4

A replica is one actor: the engine on the actor's event loop, its ranks as subprocesses, all on one machine.
With nnodes=N it has an actor on each of N machines.
Ray starts, places, replaces and drains replicas and spreads requests over them; each has the HTTP API
(engine.py). Ray is imported when an application is built, and only then: it is an optional package.
"""

import os
import secrets
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import msgspec
from msgspec import Meta, Struct
from starlette.types import ASGIApp

from runtime import node
from runtime.engine import EngineApp
from runtime.errors import OptionsError, StartError, Unavailable, install_line
from runtime.json_value import Fields
from runtime.nodes.secret import NODES_SECRET
from runtime.options.groups.http import MOST_CONNECTIONS
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from runtime.options.tree import Options
from runtime.start import prepare

if TYPE_CHECKING:
    from ray.serve import Application

DEMAND = "demand"  # name of the figure by which Ray Serve scales
SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# options of the server that listens, which is Ray Serve's proxy
PROXY_OPTIONS = ("host", "port", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "grpc_mode", "enable_h2c")
# options of nodes that each replica sets by itself
NODE_OPTIONS = ("node_rank", "dist_init_addr", "dist_secret_file")
ANY_ADDRESS = "127.0.0.1:1"  # stands for --dist-init-addr until a replica has one
SMALL_S = Annotated[float, Meta(ge=0, le=86_400)]


class Scaling(Struct, frozen=True, kw_only=True):
    """How many replicas there are, and which one gets a request."""

    min_replicas: Annotated[int, Meta(ge=0)] = 1
    max_replicas: Annotated[int, Meta(ge=1)] | None = None  # None: as min_replicas, and at least 1
    target_demand: Annotated[float, Meta(gt=0, le=10)] = 0.7  # mean of Load.demand
    upscale_delay_s: SMALL_S = 30.0  # demand must have been higher for so long
    downscale_delay_s: SMALL_S = 600.0  # demand must have been lower for so long
    # demand is the mean of this time; replicas report theirs every 10 s, unless Ray's environment says else
    look_back_period_s: Annotated[float, Meta(gt=10, le=86_400)] = 30.0
    # load: of two replicas the one with fewer requests; session: the header x-session-id decides
    routing: Literal["load", "session"] = "load"

    @property
    def most(self) -> int:
        """The most replicas there may be."""
        return max(1, self.min_replicas) if self.max_replicas is None else self.max_replicas


def app(arguments: dict[str, object]) -> "Application":
    """The application, as `serve run` and configuration files of Ray Serve ask for it. `arguments` are fields
    of Scaling and options of `runtime serve` with underscores; values may be texts. Raises OptionsError with
    every argument that cannot work, and StartError where Ray is not installed."""
    try:
        from ray import serve
    except ImportError:
        raise StartError(f"runtime.ray needs Ray Serve: {install_line('ray')}") from None
    scaling, options, given = read(arguments)
    replica = serve.ingress()(EngineReplica)
    return serve.deployment(replica, name="runtime", **settings(scaling, options)).bind(given)


def read(arguments: Mapping[str, object]) -> tuple[Scaling, Options, dict[str, object]]:
    """-> scaling, the options of each replica, and these as they were given. Raises OptionsError."""
    own = {name: value for name, value in arguments.items() if name in Scaling.__struct_fields__}
    given = {name: value for name, value in arguments.items() if name not in own}
    problems: list[str] = []
    scaling, options = Scaling(), Options()
    try:
        scaling = msgspec.convert(own, Scaling, strict=False)
    except msgspec.ValidationError as error:
        problems.append(f"{', '.join(sorted(own))}: {error}")
    try:
        parsed = from_values(with_address(given))
    except OptionsError as error:
        problems += error.problems
    else:
        options = parsed.options
        problems += [
            f"{name.replace('_', '-')}: each replica chooses its own; leave it out"
            for name in NODE_OPTIONS
            if name in given or name.replace("_", "-") in given
        ]
        problems += [
            f"{name}: Ray Serve's proxy has the address, and is set up by its http_options; leave it out"
            for name in PROXY_OPTIONS
            if name in parsed.sources
        ]
        problems += _problems(options)
    if scaling.most < scaling.min_replicas:
        problems.append(
            f"max_replicas {scaling.most} is below min_replicas {scaling.min_replicas}; raise or lower one"
        )
    if problems:
        raise OptionsError(problems)
    return scaling, options, given


def with_address(given: Mapping[str, object]) -> dict[str, object]:
    """The options with a place of the nodes, if they say how many there are."""
    has_nodes = not given.keys().isdisjoint(("nnodes", "--nnodes"))
    return {**({"dist_init_addr": ANY_ADDRESS} if has_nodes else {}), **given}


def _problems(options: Options) -> list[str]:
    """What of the options cannot work in an actor of Ray."""
    parallel = options.parallel
    problems = []
    if parallel.device == "auto":
        problems.append(
            "device: name it (cuda, npu or cpu), because Ray finds a machine that has it; auto would mean "
            "the machine on which the application is built"
        )
    if parallel.device == "cpu" and parallel.num_threads == "auto":
        problems.append(
            "num_threads: name the cores of each rank, which a replica asks Ray for; auto would take all "
            "cores of a machine for each replica"
        )
    return problems


def settings(scaling: Scaling, options: Options) -> Fields:
    """Settings of the deployment, by the names of Ray Serve's decorator."""
    connections = options.http.max_connections
    nodes = options.parallel.nnodes
    found: Fields = {
        "ray_actor_options": resources(options),
        # the engine has a queue of its own, whose requests share prefixes and take turns
        "max_ongoing_requests": MOST_CONNECTIONS if connections == "auto" else connections,
        "graceful_shutdown_timeout_s": options.http.shutdown_timeout,
    }
    if scaling.most > scaling.min_replicas:
        found["autoscaling_config"] = {
            "min_replicas": scaling.min_replicas,
            "max_replicas": scaling.most,
            "upscale_delay_s": scaling.upscale_delay_s,
            "downscale_delay_s": scaling.downscale_delay_s,
            "look_back_period_s": scaling.look_back_period_s,
            "policy": {
                "policy_function": f"{DemandPolicy.__module__}:{DemandPolicy.__name__}",
                "policy_kwargs": {"target_demand": scaling.target_demand},
            },
        }
    else:
        found["num_replicas"] = scaling.most
    if scaling.routing == "session":
        found["request_router_config"] = {"request_router_class": SESSION_ROUTER}
    if nodes > 1:
        asked = [resources(options, has_loop=number == 0) for number in range(nodes)]
        found["placement_group_bundles"] = [bundle(one) for one in asked]
        found["placement_group_strategy"] = "STRICT_SPREAD"  # each on a machine of its own
    return found


def bundle(asked: Fields) -> Fields:
    """What `resources` asks for, by the names of a placement group."""
    named = {"CPU": asked["num_cpus"], "GPU": asked.get("num_gpus", 0), **asked.get("resources", {})}
    return {name: count for name, count in named.items() if count}


def resources(options: Options, *, has_loop: bool = True) -> Fields:
    """What a replica asks Ray for on each machine, which is that of one actor; ranks inherit the accelerators
    that Ray gives to the actor. A core is for the event loop (`has_loop`), and one for each rank or each of
    its threads."""
    parallel = options.parallel
    num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if not parallel.enable_dp_attention:  # else data_parallel_size divides these ranks
        num_ranks *= parallel.data_parallel_size
    num_ranks //= parallel.nnodes
    threads = parallel.num_threads if parallel.device == "cpu" else 1
    assert isinstance(threads, int), "checked by _problems"
    asked: Fields = {"num_cpus": has_loop + num_ranks * threads}
    if parallel.device == "cuda":
        asked["num_gpus"] = num_ranks
    if parallel.device == "npu":
        asked["resources"] = {"NPU": num_ranks}
    return asked


class ScalingContext(Protocol):
    """What the policy reads of ray.serve.config.AutoscalingContext."""

    target_num_replicas: int
    # means of the figures of `record_autoscaling_stats`: name -> replica -> mean; None: there are none yet
    aggregated_metrics: Mapping[str, Mapping[object, float]] | None


class DemandPolicy:
    """Autoscaling policy: so many replicas that the mean demand of each is the target. Ray Serve applies
    delays and bounds to what it returns, and starts the first replica when there is none."""

    def __init__(self, target_demand: float) -> None:
        self._target = target_demand

    def __call__(self, context: ScalingContext) -> tuple[float, dict[str, object]]:
        """-> replicas that there should be, and no state."""
        demands = (context.aggregated_metrics or {}).get(DEMAND)
        if not demands:  # no replica has reported yet
            return context.target_num_replicas, {}
        return sum(demands.values()) / self._target, {}


class RayNode:
    """The actor of one node. Ray starts it again, and `run` with it, when it died."""

    def run(self, options: dict[str, object], secret: str) -> int:
        """Serves node 0 until that has ended in order. -> 0. Raises StartError where node 0 refuses it."""
        os.environ[NODES_SECRET.variable] = secret
        while code := node.run(plan_for(from_values(options))):
            continue  # node 0 did not come in time: it may be started again, on another machine
        return code


class RayNodes:
    """The other nodes of a replica whose ranks are on several machines: an actor in each bundle of its
    placement group but the first one, which has the replica's own actor, node 0. They meet as nodes without
    Ray do; address and secret are made up here, and the secret goes to the actors as an argument. They end
    with the actor that opens them."""

    def __init__(self, options: dict[str, object], count: int, asked: Fields) -> None:
        """For the actor of node 0, in its placement group. `options`: of the replica; `count`: nodes;
        `asked`: resources of each other node, by the names of Ray's decorator."""
        import ray
        from ray.util import get_current_placement_group, get_node_ip_address
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        host = get_node_ip_address()
        with socket.create_server((host, 0)) as probe:
            self.address = f"{host}:{probe.getsockname()[1]}"
        secret = os.environ.setdefault(NODES_SECRET.variable, secrets.token_hex(32))
        group = get_current_placement_group()
        make = ray.remote(max_restarts=-1, max_task_retries=-1, **asked)(RayNode)
        self._actors = []
        for number in range(1, count):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            actor = make.options(scheduling_strategy=place).remote()
            own = options | {"dist_init_addr": self.address, "node_rank": number}
            self._actors.append((actor, actor.run.remote(own, secret)))


class EngineReplica:
    """One replica: an actor of Ray Serve, which calls these methods on the event loop of the engine."""

    _nodes: RayNodes | None = None  # with several nodes

    def __init__(self, options: dict[str, object]) -> None:
        """Raises StartError for what a start refuses. Ray Serve's status shows errors of this method, and of
        an application's lifespan only that there was one."""
        parsed = from_values(with_address(options)).options
        if (count := parsed.parallel.nnodes) > 1:
            self._nodes = RayNodes(options, count, resources(parsed, has_loop=False))
            options = options | {"dist_init_addr": self._nodes.address}
        prepare(plan_for(from_values(options)))
        self._app = EngineApp(**options)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application, whose lifespan Ray Serve drives: requests come when it has started."""
        return self._app

    async def check_health(self) -> None:
        """Raises Unavailable when the engine has ended, so that Ray replaces the replica. Ranks that are
        started again are no reason: running requests wait for them."""
        engine = self._app.engine
        if engine is not None and (state := engine.health().state) in ("failed", "closed"):
            raise Unavailable(f"the engine of this replica is {state}; its log says why")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The figures by which Ray Serve scales."""
        return {} if self._app.engine is None else {DEMAND: self._app.engine.load().demand}
