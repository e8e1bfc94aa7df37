"""The policy of a run, as its description (in `run.json` and in the trace) states it."""

from collections.abc import Mapping
from typing import Any

from rrfp.schedule.hints.hint import WeightGradients
from rrfp.schedule.policy import DEFAULT_LIMIT, AgreementRule, Dispatch

POLICY = "policy"
"""The description's key for the effective policy, keyed by flag; a null bound withholds nothing."""


def unbound_policy(hint: str, dispatch: Dispatch) -> dict[str, object]:
    """The policy of a run that our dispatcher did not steer."""
    return {
        "hint": hint,
        "dispatch": str(dispatch),
        "limit": None,
        "hold": None,
        "w": str(WeightGradients.IDLE),
        "agreement": str(AgreementRule.INTERSECTION),
    }


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
    return {**settings, "limit": DEFAULT_LIMIT}
