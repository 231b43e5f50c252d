"""The application for Ray Serve, as far as it needs no Ray; tests/e2e/test_ray.py runs it on a cluster."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.errors import ModelError, OptionsError, StartError, Unavailable
from runtime.json_value import Fields
from runtime.options.groups.parallel import Parallel
from runtime.options.table import by_name
from runtime.options.tree import Options
from runtime.ray import PROXY_OPTIONS, DemandPolicy, EngineReplica, Scaling, app, read, settings
from runtime.service import Health, Load

TWO_NODES: Fields = {"device": "cuda", "nnodes": 2, "tensor_parallel_size": 8}


def test_arguments_are_options_and_scaling() -> None:
    """Values may be texts, as `serve run` passes them."""
    scaling, options, given = read(
        {
            "device": "cuda",
            "tensor-parallel-size": "4",
            "max_replicas": "3",
            "target_demand": "0.5",
            "routing": "session",
            "stream_output": "true",
        }
    )
    assert scaling == Scaling(max_replicas=3, target_demand=0.5, routing="session")
    assert options.parallel.tensor_parallel_size == 4 and options.http.stream_output
    assert given == {"device": "cuda", "tensor-parallel-size": "4", "stream_output": "true"}


def test_all_problems_come_together() -> None:
    with pytest.raises(OptionsError) as caught:
        read({"modle_path": "x", "min_replicas": -1})
    assert len(caught.value.problems) == 2
    assert "min_replicas" in caught.value.problems[0] and "modle_path" in caught.value.problems[1]


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        ({}, "device: name it"),
        ({"device": "cpu"}, "num_threads: name the cores"),
        ({**TWO_NODES, "dist_init_addr": "10.0.0.1:1"}, "dist-init-addr: each replica chooses its own"),
        ({**TWO_NODES, "node_rank": 1}, "node-rank: each replica chooses its own"),
        ({**TWO_NODES, "tensor_parallel_size": 3}, "--nnodes 2 does not divide"),
        ({"device": "null", "port": 8000}, "port: Ray Serve's proxy has the address"),
        (
            {"device": "null", "min_replicas": 3, "max_replicas": 2},
            "max_replicas 2 is below min_replicas 3; raise",
        ),
        ({"device": "null", "routing": "prefix"}, "routing"),
        ({"device": "null", "target_demand": 0}, "target_demand"),
    ],
)
def test_what_cannot_work_is_refused(arguments: Fields, shows: str) -> None:
    with pytest.raises(OptionsError) as caught:
        read(arguments)
    assert any(shows in problem for problem in caught.value.problems)


def test_options_of_the_proxy_are_options() -> None:
    assert set(PROXY_OPTIONS) <= by_name().keys()
    assert not set(Scaling.__struct_fields__) & by_name().keys(), "an argument has one meaning"


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"device": "null"}, {"num_cpus": 2}),
        ({"device": "cpu", "num_threads": 8, "tensor_parallel_size": 2}, {"num_cpus": 17}),
        (
            {"device": "cuda", "tensor_parallel_size": 4, "pipeline_parallel_size": 2},
            {"num_cpus": 9, "num_gpus": 8},
        ),
        ({"device": "npu", "data_parallel_size": 2}, {"num_cpus": 3, "resources": {"NPU": 2}}),
    ],
)
def test_a_replica_asks_for_what_its_ranks_need(options: Fields, asked: Fields) -> None:
    scaling, parsed, _ = read(options)
    assert settings(scaling, parsed)["ray_actor_options"] == asked


def test_a_replica_of_several_machines_has_a_bundle_on_each() -> None:
    """The event loop, and a core for it, is on the first."""
    found = settings(*read(TWO_NODES)[:2])
    assert found["ray_actor_options"] == {"num_cpus": 5, "num_gpus": 4}
    assert found["placement_group_bundles"] == [{"CPU": 5, "GPU": 4}, {"CPU": 4, "GPU": 4}]
    assert found["placement_group_strategy"] == "STRICT_SPREAD"
    npus = settings(*read({"device": "npu", "nnodes": "2", "data_parallel_size": 4})[:2])
    assert npus["placement_group_bundles"] == [{"CPU": 3, "NPU": 2}, {"CPU": 2, "NPU": 2}]


def test_groups_of_attention_share_the_ranks() -> None:
    shared = Parallel(device="cuda", tensor_parallel_size=4, data_parallel_size=2, enable_dp_attention=True)
    assert settings(Scaling(), Options(parallel=shared))["ray_actor_options"]["num_gpus"] == 4


def test_settings_of_the_deployment() -> None:
    """A number of replicas, or bounds of one, never both; limits are those of the options."""
    fixed = settings(*read({"device": "null", "min_replicas": 2, "max_connections": 50})[:2])
    assert fixed["num_replicas"] == 2 and fixed["max_ongoing_requests"] == 50
    assert fixed["graceful_shutdown_timeout_s"] == 30 and "autoscaling_config" not in fixed
    given = {"device": "null", "min_replicas": 0, "shutdown_timeout": 7, "routing": "session"}
    scaled = settings(*read(given)[:2])
    assert "num_replicas" not in scaled and scaled["graceful_shutdown_timeout_s"] == 7
    assert scaled["autoscaling_config"]["min_replicas"] == 0
    assert scaled["autoscaling_config"]["max_replicas"] == 1
    assert "ConsistentHashRouter" in scaled["request_router_config"]["request_router_class"]


@pytest.mark.parametrize(
    ("metrics", "replicas"),
    [
        (None, 3),
        ({}, 3),
        ({"demand": {}}, 3),
        ({"demand": {"a": 0.0, "b": 0.0}}, 0.0),
        ({"demand": {"a": 1.5, "b": 0.5}}, 4.0),
    ],
)
def test_the_policy_aims_at_the_target(metrics: Any, replicas: float) -> None:
    context = SimpleNamespace(target_num_replicas=3, aggregated_metrics=metrics)
    assert DemandPolicy(target_demand=0.5)(context) == (replicas, {})


def test_a_replica_refuses_what_a_start_refuses() -> None:
    with pytest.raises(ModelError, match="/nowhere does not exist"):
        EngineReplica({"device": "null", "model_path": "/nowhere"})


@pytest.mark.anyio
async def test_health_and_figures_of_a_replica() -> None:
    """Ray replaces a replica whose engine has ended, and none whose ranks are started again."""
    replica = EngineReplica({"device": "null"})
    await replica.check_health()  # it starts
    assert await replica.record_autoscaling_stats() == {}
    engine = SimpleNamespace(
        health=lambda: Health("recovering"), load=lambda: Load(page_size=1, max_running=20, running=5)
    )
    replica._app.engine = engine  # type: ignore[assignment]
    await replica.check_health()
    assert await replica.record_autoscaling_stats() == {"demand": 0.25}
    engine.health = lambda: Health("failed")
    with pytest.raises(Unavailable, match="is failed"):
        await replica.check_health()


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StartError, match=r"pip install 'runtime-serve\[ray\]'"):
        app({"device": "null"})
