"""Does a host know by which interface the others reach it?"""

from __future__ import annotations

import pytest

from rpipe.runtime.network import Link, NetworkError, choose, settle

HERE = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "ens3": ["10.1.4.7"], "ib0": []}


def test_one_host_talks_over_loopback():
    assert choose(None, "n1", ["n1", "n1"], HERE) == Link("lo", "127.0.0.1")


def test_an_interface_is_named_or_found_by_its_network():
    assert choose("ens3", "n1", ["n1", "n2"], HERE) == Link("ens3", "10.1.4.7")
    assert choose("10.1.0.0/16", "n1", ["n1", "n2"], HERE) == Link("ens3", "10.1.4.7")


@pytest.mark.parametrize("wanted", ["eth9", "ib0", "10.2.0.0/16"])
def test_what_is_not_there_is_told_with_what_is(wanted):
    with pytest.raises(NetworkError, match=f"cluster.interface = {wanted}: no .* on n1; it has: docker0 172.17.0.1, ens3"):
        choose(wanted, "n1", ["n1", "n2"], HERE)


def test_by_itself_it_takes_the_route_to_another_host_and_refuses_loopback():
    with pytest.raises(NetworkError, match=r"n1 reaches localhost by 127\.0\.0\.1, which others cannot dial"):
        choose(None, "n1", ["n1", "localhost"], HERE)
    with pytest.raises(NetworkError, match=r"n1 finds no way to no-such-host\.invalid"):
        choose(None, "n1", ["n1", "no-such-host.invalid"], HERE)


def test_what_a_site_set_for_nccl_and_hccl_stays():
    environ = {"NCCL_SOCKET_IFNAME": "bond0"}
    settle(Link("ens3", "10.1.4.7"), environ)
    assert environ == {"NCCL_SOCKET_IFNAME": "bond0", "GLOO_SOCKET_IFNAME": "ens3", "HCCL_SOCKET_IFNAME": "ens3"}
