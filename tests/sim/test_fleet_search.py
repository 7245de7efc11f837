"""The answer to a search on a fleet of GPUs: which changes are priced by their graphs."""

from __future__ import annotations

from collections.abc import Callable

from nereus.control.fleet_outlook import FleetOutlook
from nereus.control.fleet_search import ALTERNATIVES_COUNT, PRICED_COUNT, Pricer, propose_fleet
from nereus.control.proposals import Proposal
from nereus.control.records import PriceEstimate, SearchRequest
from nereus.layout import Plan, first_plan
from tests.sim.scene import H100, job, plan_config, world

ESTIMATE_SECONDS = 50.0


def taking(seconds: float) -> PriceEstimate:
    return PriceEstimate(mean_seconds=seconds, deviation_seconds=1.0, bound_seconds=seconds)


def proposed(graph: Callable[[int], PriceEstimate | None]) -> tuple[Proposal, list[str]]:
    """The answer from a poor plan on 16 slots, and the plans whose graphs were asked for; `graph` prices the n-th of them."""
    config = job(plan=plan_config(8, 2, 1, 8))
    fleet = world(config, [(0, 2)], memory_bytes=H100.memory_bytes)[0].fleet
    present, asked = first_plan(config), list[str]()

    def price(plan: Plan) -> PriceEstimate | None:
        asked.append(plan.plan_id)
        return graph(len(asked))

    found = propose_fleet(
        SearchRequest(
            reason="a test", step=1, present=present, slots=fleet.slots, empty_slots=(), horizon_steps=5.0,
            remaining_steps=5, ratios=(),
        ),
        FleetOutlook(config=config, inventory=fleet, plans={present.plan_id: present}),
        Pricer(price=price, estimate=lambda _: taking(ESTIMATE_SECONDS), bound=lambda _: 40.0),
        100_000,
    )  # fmt: skip
    return found, asked


def test_one_graph_is_enough_when_the_estimate_holds() -> None:
    found, asked = proposed(lambda _: taking(ESTIMATE_SECONDS))
    assert asked == [found.candidates[0].plan_id]
    assert ALTERNATIVES_COUNT <= len(found.candidates) <= PRICED_COUNT


def test_the_first_is_priced_by_its_graph_though_graphs_are_dearer() -> None:
    found, asked = proposed(lambda count: taking(1000.0 if count < 3 else ESTIMATE_SECONDS - 1))
    first = found.candidates[0]
    assert len(asked) == 3
    assert first.plan_id == asked[-1]
    assert first.price.mean_seconds == ESTIMATE_SECONDS - 1
    assert {each.plan_id: each.price.mean_seconds for each in found.candidates[1:]}[asked[0]] == 1000.0


def test_where_no_change_leads_is_no_candidate() -> None:
    found, asked = proposed(lambda _: None)
    assert not found.candidates
    assert found.reason
    assert len(set(asked)) == len(asked) == PRICED_COUNT
