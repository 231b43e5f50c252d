"""The manifests in deploy/: each fits the schema of its kind, and what they say of each other, of the
server's options and of the images is so. tests/shape/test_deploy.py has more of kubernetes.yaml."""

import json
import re
from typing import Any

import pytest
import yaml

from runtime.json_value import Fields
from runtime.metrics.table import Metrics
from runtime.options.parse import from_argv
from runtime.ray import Scaling, app, read
from tests.shape.source import ROOT

VERSION = "1.31"  # of Kubernetes' schemas
MANIFESTS = [
    manifest
    for path in sorted((ROOT / "deploy").glob("*.yaml"))
    if path.name != "ray.yaml"
    for manifest in yaml.safe_load_all(path.read_text("utf-8"))
]
OWN_KINDS = ("Secret", "Service", "Deployment", "HorizontalPodAutoscaler")  # of Kubernetes itself
METRIC_KINDS = dict(re.findall(r"^# TYPE (\S+) (\S+)$", Metrics().render().decode(), re.MULTILINE))
LWS = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "runtime-nodes-0.runtime-nodes"}


def one(kind: str, name: str) -> Any:
    (found,) = [m for m in MANIFESTS if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def pods() -> dict[str, Fields]:
    """The pod that each template makes, as a manifest of its own."""
    group = one("LeaderWorkerSet", "runtime-nodes")["spec"]["leaderWorkerTemplate"]
    templates = {
        "server": one("Deployment", "runtime")["spec"]["template"],
        "leader": group["leaderTemplate"],
        "worker": group["workerTemplate"],
    }
    return {
        name: {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, **template["metadata"]},
            "spec": template["spec"],
        }
        for name, template in templates.items()
    }


def container(pod: str) -> Any:
    (only,) = pods()[pod]["spec"]["containers"]
    return only


@pytest.mark.parametrize(
    "manifest",
    [*(m for m in MANIFESTS if m["kind"] in OWN_KINDS), *pods().values()],
    ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}",
)
def test_manifests_fit_their_schemas(manifest: Fields) -> None:
    """Names that the schema has not are refused, too."""
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(manifest, VERSION, strict=True)
    broken = json.loads(json.dumps(manifest).replace('"name"', '"nmae"', 1))
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, VERSION, strict=True)


def test_every_kind_is_known() -> None:
    """Kinds of other projects are looked at by the tests below, and their pods by the one above."""
    assert {m["kind"] for m in MANIFESTS} == {*OWN_KINDS, "LeaderWorkerSet", "PodMonitor"}


def test_the_pod_monitor_finds_the_server() -> None:
    monitor = one("PodMonitor", "runtime")
    labels = pods()["server"]["metadata"]["labels"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"]["selector"]["matchLabels"] == labels
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == container("server")["ports"][0]["name"]
    assert endpoint["path"] == pods()["server"]["metadata"]["annotations"]["prometheus.io/path"]
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    job = labels[monitor["spec"]["jobLabel"]]
    assert f"job_name: {job}\n" in page and f'job="{job}"' in page


def test_the_autoscaler_reads_a_metric_of_the_deployment() -> None:
    spec = one("HorizontalPodAutoscaler", "runtime")["spec"]
    target = spec["scaleTargetRef"]
    assert one(target["kind"], target["name"])["apiVersion"] == target["apiVersion"]
    (metric,) = spec["metrics"]
    assert METRIC_KINDS[metric["pods"]["metric"]["name"]] == "gauge"
    assert metric["pods"]["target"]["averageValue"] == f"{Scaling().target_demand * 1000:.0f}m"


def options(pod: str, index: int) -> Any:
    """The options that a node of the group gets: those of the image and of its pod."""
    image = (ROOT / "docker" / "cuda.Dockerfile").read_text("utf-8")
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", image, re.MULTILINE)[0])
    words = [*entry[2:], *(word for arg in container(pod)["args"] for word in arg.split("=", 1))]
    values = LWS | {"LWS_WORKER_INDEX": str(index)}
    return from_argv([re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], word) for word in words]).options


def test_nodes_of_a_group_differ_in_their_rank_alone() -> None:
    group = one("LeaderWorkerSet", "runtime-nodes")["spec"]["leaderWorkerTemplate"]
    assert f"{group['size']}" == LWS["LWS_GROUP_SIZE"]
    leader, worker = container("leader"), container("worker")
    assert leader["args"] == worker["args"]
    parts = [options("leader", 0).parallel, options("worker", 1).parallel]
    assert [one.node_rank for one in parts] == [0, 1] and {one.nnodes for one in parts} == {group["size"]}
    ranks = parts[0].tensor_parallel_size * parts[0].pipeline_parallel_size
    cards = {int(one["resources"]["limits"]["nvidia.com/gpu"]) for one in (leader, worker)}
    assert cards == {ranks // group["size"]}
    port = int(parts[0].dist_init_addr.rpartition(":")[2])
    assert [one["containerPort"] for one in leader["ports"]] == [options("leader", 0).http.port, port]
    (secret,) = [one for one in leader["env"] if one["name"] == "RUNTIME_DIST_SECRET"]
    key = secret["valueFrom"]["secretKeyRef"]
    assert key["key"] in one("Secret", key["name"])["stringData"]


def test_requests_reach_leaders_which_drain_before_their_workers_end() -> None:
    selector = one("Service", "runtime-nodes")["spec"]["selector"]
    assert selector.pop("leaderworkerset.sigs.k8s.io/worker-index") == "0"
    assert selector.items() <= pods()["leader"]["metadata"]["labels"].items()
    waits = {name: int(container(name)["lifecycle"]["preStop"]["exec"]["command"][1]) for name in pods()}
    timeout = options("leader", 0).http.shutdown_timeout
    grace = {name: pod["spec"]["terminationGracePeriodSeconds"] for name, pod in pods().items()}
    assert grace["leader"] == waits["leader"] + timeout + 10
    assert waits["worker"] >= grace["leader"] and grace["worker"] == waits["worker"] + 10


@pytest.mark.parametrize("pod", ["leader", "worker"])
def test_pods_have_the_volumes_and_probes_that_they_name(pod: str) -> None:
    spec, only = pods()[pod]["spec"], container(pod)
    assert {mount["name"] for mount in only["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    ports = {port["name"] for port in only["ports"]}
    assert all(only[probe]["httpGet"]["port"] in ports for probe in only if probe.endswith("Probe"))
    assert "livenessProbe" not in only or only["livenessProbe"]["httpGet"]["path"] == "/metrics"
    mounted = {mount["name"]: mount["mountPath"] for mount in only["volumeMounts"]}
    assert str(options(pod, 0).api.api_key_file).startswith(mounted["keys"])
    assert str(options(pod, 0).model.model_path).startswith(mounted["models"])


def test_the_metrics_that_endpoint_pickers_read_exist() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+Spec)` \| `(\w+)` \|", page, re.MULTILINE))
    assert len(rows) == 5
    assert {METRIC_KINDS.get(metric) for metric in rows.values()} == {"gauge"}


def test_the_file_for_ray_is_read_as_the_application_reads_it() -> None:
    file = yaml.safe_load((ROOT / "deploy" / "ray.yaml").read_text("utf-8"))
    (application,) = file["applications"]
    assert application["import_path"] == f"{app.__module__}:{app.__name__}"
    scaling, parsed, _ = read(application["args"])
    assert scaling.most == 4 and parsed.parallel.device == "cuda"


def test_the_line_for_ray_in_the_docs() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    (words,) = re.findall(r"^    serve run runtime\.ray:app (.*)$", page, re.MULTILINE)
    scaling, parsed, _ = read(dict(word.split("=", 1) for word in words.split()))
    assert scaling.most == 4 and parsed.parallel.tensor_parallel_size == 2
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| [^|]* \|", page.partition("## Ray")[2], re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == set(Scaling.__struct_fields__)
