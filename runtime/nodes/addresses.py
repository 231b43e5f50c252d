"""--dist-init-addr, and the network interface by which a node reaches it."""

import fcntl
import os
import socket
import struct
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from runtime.errors import OptionsError
from runtime.options.groups.parallel import ParallelPlan

IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IFREQ = struct.Struct("16s24x")  # linux/if.h
# variables that name the interface of a library of collectives, and how they write it
_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}", "HCCL_SOCKET_IFNAME": "={}"}


class Address(NamedTuple):
    """A host, by name or number, and a port."""

    host: str
    port: int


def parse_address(text: str) -> Address:
    """The address of --dist-init-addr: HOST:PORT, or [IPV6]:PORT. Raises OptionsError."""
    host, colon, port = text.rpartition(":")
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    if not (colon and host and not is_bare_ipv6 and port.isascii() and port.isdigit() and int(port) < 65536):
        raise OptionsError(
            [f"--dist-init-addr {text} is no address; give HOST:PORT of node 0, or [IPV6]:PORT"]
        )
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def node_environment(parallel: ParallelPlan) -> dict[str, str]:
    """Environment variables that ranks need because there are several nodes; none on one. Raises
    OptionsError."""
    if parallel.nnodes == 1 or parallel.dist_init_addr is None:
        return {}
    return interface_variables(parse_address(parallel.dist_init_addr))


def interface_variables(address: Address) -> dict[str, str]:
    """Environment variables that make the ranks' collectives use the interface by which this node reaches
    `address`, and which are not set here; none where it is not known."""
    name = interface_to(address)
    return {
        variable: form.format(name)
        for variable, form in _VARIABLES.items()
        if name and variable not in os.environ
    }


def interface_to(address: Address) -> str:
    """The name of the network interface that this node reaches `address` by; empty: not known. Nothing is
    sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            own = ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return ""
    if own.is_loopback:
        return "lo"
    return _ipv4_interface(own.packed) if own.version == 4 else _ipv6_interface(own.packed.hex())


def _ipv4_interface(packed: bytes) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(name.encode()))
            except OSError:  # it has no address of this kind
                continue
            if answer[20:24] == packed:
                return name
    return ""


def _ipv6_interface(digits: str) -> str:
    try:
        lines = IPV6_ADDRESSES.read_text(encoding="ascii").splitlines()
    except OSError:  # no IPv6 here
        return ""
    return next((line.split()[5] for line in lines if line.startswith(digits)), "")
