"""By which interface and address do the other hosts reach this one?

One host: loopback. Several: the interface that the config names (by its name, or as a network such as 10.1.0.0/16 where the
names differ from host to host), else the one by which this host reaches another of the job's. This host's own name is not
asked: Debian's resolves to 127.0.1.1 at home.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
_ANY_PORT = 9  # of a UDP socket that sends nothing


class NetworkError(RuntimeError):
    """No way to the other hosts; one line says what there is."""


@dataclass(frozen=True, slots=True)
class Link:
    interface: str
    address: str  # IPv4


def choose(wanted: str | None, host: str, hosts: Sequence[str], addresses: Mapping[str, Sequence[str]] | None = None) -> Link:
    """`hosts`: of every rank. `addresses`: interface -> its IPv4 addresses, default this machine's. Raises NetworkError."""
    if wanted is None and len(set(hosts)) == 1:
        return Link("lo", "127.0.0.1")
    have = _addresses() if addresses is None else addresses
    if wanted is None:
        return _towards(next(name for name in hosts if name != host), host, have)
    if have.get(wanted):
        return Link(wanted, have[wanted][0])
    if "/" in wanted:
        network = ipaddress.ip_network(wanted, strict=False)
        for name, found in have.items():
            for address in found:
                if ipaddress.ip_address(address) in network:
                    return Link(name, address)
    listed = ", ".join(f"{name} {' '.join(found)}" for name, found in sorted(have.items()) if found)
    what = "address in that network" if "/" in wanted else "such interface with an IPv4 address"
    raise NetworkError(f"cluster.interface = {wanted}: no {what} on {host}; it has: {listed}")


def settle(link: Link, environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell gloo, NCCL and HCCL, here and in the engine that this process starts; what slurm/env said stays, but for gloo's."""
    environ[NAMES[0]] = link.interface
    for name in NAMES[1:]:
        environ.setdefault(name, link.interface)


def _towards(peer: str, host: str, have: Mapping[str, Sequence[str]]) -> Link:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, _ANY_PORT))  # asks the kernel for the route
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise NetworkError(f"{host} finds no way to {peer}: {error}; name the network: cluster.interface = eth0, say") from None
    name = next((name for name, found in have.items() if address in found), None)
    if name is None or address.startswith("127."):
        raise NetworkError(
            f"{host} reaches {peer} by {address}, which others cannot dial; wanted: cluster.interface = eth0, say"
        )
    return Link(name, address)


def _addresses() -> dict[str, list[str]]:
    import psutil

    return {
        name: [entry.address for entry in found if entry.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }
