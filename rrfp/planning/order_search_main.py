"""What a planner's process of the simulator does: it plans steps that it is sent, one by one."""

from rrfp.errors import RrfpError
from rrfp.planning.order_search import plan_entry
from rrfp.planning.process_pool import Requests, answer


def main() -> None:
    requests = Requests()
    for known, num_simulations in requests:
        try:
            plan = plan_entry(known, num_simulations, requests.is_over)
        except RrfpError as error:
            answer({"error": str(error), "kind": type(error).__name__})
            continue
        answer(
            {
                "order": plan.order,
                "candidates": plan.num_candidates,
                "predicted_ns": plan.predicted_ns,
                "pyramid_ns": plan.pyramid_ns,
            }
        )
