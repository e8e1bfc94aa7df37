"""What the figures of a comparison say, in sentences."""

from rrfp.analyze.compare import Comparison, Estimate
from rrfp.analyze.units import tell
from rrfp.trace.records import NS_PER_S


def verdict(report: Comparison, a_step: str = "A step") -> list[str]:
    """Sentences: for the same work first, for which a schedule answers; then what the tasks took,
    and the steps as they were."""
    told = []
    if report.same_work_ratio is not None:
        told.append(f"For the same work {_speed(report.same_work_ratio)}.")
    if report.work_ratio is not None and report.work_ratio.leaves_out(1):
        longer = "longer" if report.work_ratio.median > 1 else "less time"
        told.append(f"The tasks of B themselves take {_percent(report.work_ratio)} {longer}.")
    a, b = (tell(seconds * NS_PER_S) for seconds in report.step_s)
    told.append(f"{a_step} takes {a} in A and {b} in B (median): {_speed(report.step_time_ratio)}.")
    return told


def _speed(ratio: Estimate) -> str:
    if not ratio.leaves_out(1):
        return "no difference that stands out from the noise of these steps"
    return f"B is {'faster' if ratio.median < 1 else 'slower'}, by {_percent(ratio)}"


def _percent(ratio: Estimate) -> str:
    return f"{abs(1 - ratio.median):.1%}"
