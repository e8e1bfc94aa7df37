"""What steered a run, as its description (`run.json`, and the trace) states it."""

from collections.abc import Mapping
from typing import Any

from rrfp.schedule.hints.hint import WeightGradients
from rrfp.schedule.policy import DEFAULT_LIMIT, AgreementRule, Dispatch

POLICY = "policy"
"""Where a description has the effective policy, by its flags; null withholds nothing."""


def unbound_policy(hint: str, dispatch: Dispatch) -> dict[str, object]:
    """The policy of a run that no dispatcher of ours steered."""
    return {
        "hint": hint,
        "dispatch": str(dispatch),
        "limit": None,
        "hold": None,
        "w": str(WeightGradients.IDLE),
        "agreement": str(AgreementRule.INTERSECTION),
    }


def stated_policy(description: Mapping[str, Any]) -> dict[str, Any]:
    """The effective policy of a run, whatever stands there; empty where nothing is told.

    Earlier versions kept its parts among the settings, and left the usual limit out, which only
    simulated runs could do without.
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
