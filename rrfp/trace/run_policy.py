"""The policy of a run, as its description (in `run.json` and in the trace) states it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rrfp.schedule.policy import KNOBS, PAPER_LIMIT, Dispatch

POLICY = "policy"
"""The description's key for the effective policy, keyed by flag; a null bound withholds nothing."""

POLICIES = "policies"
"""Its key for the policies that were chosen during the run: a list, each with the `first_step` that
it steered, and the `policy` from then on."""
FIRST_STEP = "first_step"


def unbound_policy(hint: str, dispatch: Dispatch) -> dict[str, object]:
    """The policy of a run that our dispatcher did not steer."""
    usual = {name: each.describe(each.default) for name, each in KNOBS.items()}
    return usual | {"hint": hint, "dispatch": str(dispatch)}


def stated_policy(description: Mapping[str, Any]) -> dict[str, Any]:
    """The effective policy of a run, unvalidated; empty if the description states none.

    Earlier versions kept its parts among the settings and left out the usual limit, which only
    simulated runs could lack.
    """
    policy = description.get(POLICY)
    if isinstance(policy, dict):
        return policy
    settings = description.get("settings")
    if not isinstance(settings, dict):
        return {}
    is_bound = settings.get("limit") is not None or settings.get("hold") is not None
    is_ready = settings.get("dispatch", Dispatch.READY) == Dispatch.READY
    if is_bound or not is_ready or description.get("simulated") is True:
        return settings
    return {**settings, "limit": PAPER_LIMIT}


def policies_by_step(policies: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """What a description says of the policies of steps 0, 1, ..; nothing if they are the same."""
    begun = [
        {FIRST_STEP: step, POLICY: dict(policy)}
        for step, policy in enumerate(policies)
        if step == 0 or policy != policies[step - 1]
    ]
    return {POLICIES: begun} if len(begun) > 1 else {}


def stated_policy_of_step(description: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The policy that steered a step of a session, likewise."""
    chosen = description.get(POLICIES)
    found = [
        each[POLICY]
        for each in (chosen if isinstance(chosen, list) else ())
        if isinstance(each, dict)
        and isinstance(each.get(POLICY), dict)
        and isinstance(each.get(FIRST_STEP), int)
        and each[FIRST_STEP] <= step
    ]
    return found[-1] if found else stated_policy(description)
