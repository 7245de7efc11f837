"""Fleets: nodes, network ports and rates from text, and what is left when slots are lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.errors import ConfigError
from nereus.fleet import CPU_SLOT, DEVICES, GB, Fleet, Node, parse_fleet, uniform
from tests.moving import fleets


def test_text_gives_nodes_of_each_device() -> None:
    fleet = parse_fleet("16xh100,3xA100-40, 5 x gb200")
    assert [(len(n.slots), n.device.name) for n in fleet.nodes] == [
        (8, "h100"),
        (8, "h100"),
        (3, "a100-40"),
        (4, "gb200"),
        (1, "gb200"),
    ]
    assert fleet.slots == tuple(range(24))
    assert str(fleet) == "16xh100,3xa100-40,5xgb200"
    assert parse_fleet(str(fleet)) == fleet
    assert fleet.device_of[17].memory_bytes == 40 * 1024**3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16h100", "expected counts and devices"),
        ("0xh100", "expected counts and devices"),
        ("", "expected counts and devices"),
        ("8xh100,", "expected counts and devices"),
        ("8xh10", "unknown device h10.*h100"),
        ("8xtpu", "unknown device tpu"),
    ],
)
def test_text_that_names_no_fleet_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_fleet(text, "fleet.slots")
    assert "fleet.slots" in str(raised.value)


def test_uniform_fills_nodes_in_order() -> None:
    fleet = uniform(10, DEVICES["h100"], first=4)
    assert [n.slots for n in fleet.nodes] == [tuple(range(4, 12)), (12, 13)]
    assert fleet.node_of.tolist() == [-1] * 4 + [0] * 8 + [1] * 2
    assert [len(n.slots) for n in uniform(5, slots_per_node=2).nodes] == [2, 2, 1]
    assert uniform(0).slots == ()


def test_slots_share_network_ports_in_turn() -> None:
    h100 = DEVICES["h100"]
    fleet = Fleet(nodes=(Node(slots=tuple(range(8)), device=h100, nics=2), Node(slots=(8, 9, 10), device=h100)))
    assert fleet.nic_of.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 3, 4]
    assert fleet.nic_rates.tolist() == [4 * 50 * GB] * 2 + [50 * GB] * 3
    assert fleet.link_rates.tolist() == [450 * GB] * 11


@given(st.sets(st.integers(0, 30), min_size=1).flatmap(fleets), st.sets(st.integers(0, 30)))
def test_every_slot_has_a_node_a_port_and_rates_also_after_a_loss(fleet: Fleet, lost: set[int]) -> None:
    for left in (fleet, fleet.without(frozenset(lost))):
        slots = list(left.slots)
        assert set(slots) == set(fleet.slots) - (lost if left is not fleet else set())
        assert all(n.slots for n in left.nodes)
        if not slots:
            continue
        gone = np.setdiff1d(np.arange(len(left.node_of)), slots)
        assert (left.node_of[gone] == -1).all()
        assert (left.nic_of[gone] == -1).all()
        assert all(slot in left.nodes[left.node_of[slot]].slots for slot in slots)
        assert sorted(set(left.nic_of[slots].tolist())) == list(range(len(left.nic_rates)))  # no port without a slot
        assert (left.nic_rates > 0).all()
        assert (left.link_rates[slots] > 0).all()
        ports = {(int(left.node_of[s]), int(left.nic_of[s])) for s in slots}
        assert len(ports) == len(left.nic_rates)  # a port belongs to one node
        assert left.nic_rates.sum() == pytest.approx(sum(left.device_of[s].nic_bytes_per_second for s in slots))


def test_data_sheets_are_of_the_right_order() -> None:
    """Links beat the network and host memory; memory beats links; every device has a name that the text takes."""
    for name, device in DEVICES.items():
        assert parse_fleet(f"1x{name}").nodes[0].device == device
        assert device.memory_bytes_per_second > device.link_bytes_per_second >= device.nic_bytes_per_second
        assert 1e13 < device.peak_flops_per_second < 1e16
    assert replace(CPU_SLOT, name="cpu") == CPU_SLOT
