"""Whether the ranks of one host can meet in a network of their own."""

import time

from rrfp.doctor.check import Check, State, absent
from rrfp.train.ranks.private_network import NotPermittedError, made_network


def private_network() -> Check:
    """Makes one, and takes the time."""
    began_s = time.perf_counter()
    try:
        with made_network():
            taken_ms = (time.perf_counter() - began_s) * 1e3
    except NotPermittedError as error:
        advice = (
            f"cannot be made ({error}); let users make network namespaces "
            "(kernel.unprivileged_userns_clone or kernel.apparmor_restrict_unprivileged_userns, or "
            "the container's seccomp profile), or use a host without other users: gloo's ports "
            "accept anybody while a run starts"
        )
        return absent("private-network", advice)
    advice = "to make a network that only a run's own ranks can reach"
    return Check("private-network", State.OK, round(taken_ms), "ms", advice)
