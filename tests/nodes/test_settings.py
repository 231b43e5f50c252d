"""What several nodes are started with: address, secret, and that they agree."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from runtime.errors import OptionsError, StartError
from runtime.messages.nodes import Identity
from runtime.nodes.addresses import Address, interface_to, interface_variables, parse_address
from runtime.nodes.identity import checkpoint_digest, differences, given_options, identity_of
from runtime.nodes.secret import NODES_SECRET
from runtime.options.parse import from_argv
from runtime.options.plan import Plan
from runtime.options.resolve import plan_for
from tests.models.make import make_checkpoint

NODES = "--tp 2 --nnodes 2 --dist-init-addr h:1"


def plan(words: str) -> Plan:
    return plan_for(from_argv(f"{words} {NODES}".split()))


@pytest.mark.parametrize(
    ("text", "address"),
    [("a.example:50000", ("a.example", 50000)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[::1]:7", ("::1", 7))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "::1", "h:65536", "h:x", "h:-1", "h:٣"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(OptionsError, match="--dist-init-addr .* is no address"):
        parse_address(text)


def test_the_interface_is_that_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    assert interface_to(Address("127.0.0.1", 1)) == "lo"
    assert interface_to(Address("no-such-host.invalid", 1)) == ""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert interface_variables(Address("127.0.0.2", 1)) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "HCCL_SOCKET_IFNAME": "=lo",
    }, "what the user has set stays"


def test_the_secret_of_a_file_or_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    assert NODES_SECRET.read(str(file), {}) == b"0123456789abcdef"
    assert NODES_SECRET.read(None, {"RUNTIME_DIST_SECRET": " fedcba9876543210 "}) == b"fedcba9876543210"


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        (None, {}, "needs a secret that all nodes share"),
        (None, {"RUNTIME_DIST_SECRET": "short"}, "RUNTIME_DIST_SECRET has less than 16"),
        ("short", {}, "less than 16"),
        ("x" * 5000, {}, "can't be read"),
    ],
)
def test_no_secret_and_bad_ones(
    tmp_path: Path, text: str | None, environment: dict[str, str], message: str
) -> None:
    file = tmp_path / "secret"
    if text is not None:
        file.write_text(text)
    with pytest.raises(StartError, match=message) as caught:
        NODES_SECRET.read(None if text is None else str(file), environment)
    assert "openssl rand" in str(caught.value) and "short " not in str(caught.value)


def test_a_secret_file_is_a_regular_one(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="a folder"):
        NODES_SECRET.read(str(tmp_path), {})


def test_given_options_agree_where_they_must() -> None:
    found = given_options(plan("--page-size 32 --port 1 --num-threads 3 --log-level error --api-key k"))
    assert found == {"page_size": "32", "tensor_parallel_size": "2", "nnodes": "2", "dist_init_addr": "h:1"}


@pytest.mark.parametrize(
    ("words", "nodes", "replicas"),
    [
        ("--tp 2", [range(2)], [range(1), range(1)]),
        ("--dp 2", [range(1), range(1, 2)], [range(1), range(1, 2)]),
        ("--dp 4", [range(1), range(1), range(1, 2), range(1, 2)], [range(2), range(2, 4)]),
        ("--tp 2 --dp 2 --nnodes 4", [range(2), range(2, 4)], [range(1), range(1), range(1, 2), range(1, 2)]),
        ("--tp 2 --dp 2 --enable-dp-attention", [range(2)], [range(1), range(1)]),
    ],
)
def test_which_nodes_have_which_replicas(words: str, nodes: list[range], replicas: list[range]) -> None:
    count = "" if "--nnodes" in words else "--nnodes 2"
    parallel = plan_for(from_argv(f"{words} {count} --dist-init-addr h:1".split())).parallel
    assert [parallel.replica_nodes(replica) for replica in range(parallel.num_replicas)] == nodes
    assert [parallel.node_replicas(node) for node in range(parallel.nnodes)] == replicas


def test_replicas_of_a_node_have_devices_and_cores_of_their_own() -> None:
    """Those of another node have the same numbers there."""
    words = "--tp 2 --dp 4 --nnodes 2 --dist-init-addr h:1 --numa-node 0 1 2 3"
    parallel = plan_for(from_argv(words.split())).parallel
    fields = [parallel.of_ranks(replica, has_group_heads=False) for replica in range(4)]
    assert [one["first_device"] for one in fields] == [0, 2, 0, 2]
    assert [one["numa_nodes"] for one in fields] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert {(one["num_nodes"], one["num_replicas"]) for one in fields} == {(1, 2)}
    assert parallel.processes_on_node == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0"}, "version of this package"),
        ({"byte_order": "big"}, "byte order"),
        ({"num_nodes": 3}, "--nnodes is 2 on node 0, and 3 there"),
        ({"device": "null"}, "--device is cpu on node 0, and null there"),
        ({"options": {"page_size": "32"}}, "--page-size is 16 on node 0, and 32 there"),
        ({"options": {}}, "--page-size is 16 on node 0, and not given there"),
        ({"options": {"page_size": "16", "no_such": "1"}}, ""),
        ({"checkpoint": "f"}, "the files of --model-path are others"),
    ],
)
def test_differences_are_named(changes: dict[str, Any], message: str) -> None:
    ours = Identity("1", "little", 2, "cpu", {"page_size": "16"}, "e")
    assert differences(ours, ours) == []
    found = differences(ours, structs.replace(ours, **changes))
    assert len(found) == bool(message) and message in "".join(found)


def test_the_digest_tells_checkpoints_apart_wherever_they_lie(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        make_checkpoint("llama", folder)
    plans = [plan(f"--model-path {folder}") for folder in folders]
    assert checkpoint_digest(plans[0]) == checkpoint_digest(plans[1])
    file = folders[1] / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert checkpoint_digest(plans[0]) != checkpoint_digest(plans[1])
    assert differences(identity_of(plans[0]), identity_of(plans[1])) == [
        "the files of --model-path are others than on node 0"
    ]
