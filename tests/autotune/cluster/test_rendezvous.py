import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cluster.rendezvous import (
    CANDIDATES,
    choose_port,
    derived_ports,
    interface_of,
    is_free,
    own_address,
    read_addresses,
    resolve_own_name,
)
from autotune.errors import MachineLacks


@given(st.integers(min_value=0, max_value=2**32))
def test_a_jobs_ports_are_distinct_and_below_those_of_outgoing_connections(job):
    ports = derived_ports(job)
    assert len(set(ports)) == CANDIDATES
    assert all(20000 <= port < 32768 for port in ports)
    assert ports == derived_ports(job)


def test_jobs_that_follow_each_other_prefer_different_ports():
    assert len({derived_ports(job)[0] for job in range(1000)}) == 1000


def test_the_first_free_port_is_taken_and_those_before_are_named():
    ports = derived_ports(12)
    assert choose_port(12, lambda port: True) == (ports[0], ())
    assert choose_port(12, lambda port: port not in ports[:2]) == (ports[2], ports[:2])


def test_a_node_without_any_of_the_ports_is_refused_with_their_numbers():
    with pytest.raises(MachineLacks, match="job 12") as refused:
        choose_port(12, lambda port: False)
    assert str(derived_ports(12)[-1]) in refused.value.message


def test_a_port_that_somebody_listens_on_is_not_free():
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


ADDRESSES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "ib0": ["10.1.0.5"], "down0": []}


@pytest.mark.parametrize(
    ("interface", "of_name", "expected"),
    [
        ("ib0", ["10.0.0.5"], "10.1.0.5"),
        (None, ["10.1.0.5"], "10.1.0.5"),
        (None, ["127.0.1.1"], "10.0.0.5"),
        (None, ["192.168.7.7"], "10.0.0.5"),
        (None, [], "10.0.0.5"),
    ],
)
def test_the_address_is_the_interfaces_else_the_names_else_any_that_others_can_reach(interface, of_name, expected):
    assert own_address(interface, ADDRESSES, of_name) == expected


def test_a_node_with_nothing_but_loopback_uses_that():
    assert own_address(None, {"lo": ["127.0.0.1"]}, ["127.0.1.1"]) == "127.0.0.1"


@pytest.mark.parametrize("interface", ["eth9", "down0"])
def test_an_interface_without_an_address_is_refused_with_those_that_have_one(interface):
    with pytest.raises(MachineLacks, match="those with one: lo, eth0, ib0"):
        own_address(interface, ADDRESSES, [])


def test_an_address_is_its_interfaces():
    assert interface_of("10.1.0.5", ADDRESSES) == "ib0"
    assert interface_of("127.0.0.1", {}) == "lo"


def test_this_machine_has_an_address():
    own = own_address(None, read_addresses(), resolve_own_name())
    assert socket.inet_aton(own)
    assert own in read_addresses()[interface_of(own, read_addresses())]
