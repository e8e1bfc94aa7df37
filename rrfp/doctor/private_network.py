"""What keeps others away from a run's ports: a network of its own, or the kernel's filter."""

import time

from rrfp.doctor.check import Check, State, absent
from rrfp.runtime.transport.doorman import filter_refusal
from rrfp.train.ranks.private_network import NotPermittedError, made_network


def private_network() -> Check:
    """Makes one, and takes the time."""
    began_s = time.perf_counter()
    try:
        with made_network():
            taken_ms = (time.perf_counter() - began_s) * 1e3
    except NotPermittedError as error:
        filtered = "gloo's ports accept anybody while a run starts"
        if filter_refusal():
            filtered = "gloo's ports accept anybody"
        advice = (
            f"cannot be made ({error}); let users make network namespaces "
            "(kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns or "
            "user.max_user_namespaces; in a container its seccomp profile, or as root "
            f"CAP_SYS_ADMIN and CAP_NET_ADMIN), or use a host without other users: {filtered}"
        )
        return absent("private-network", advice)
    advice = "to make a network that only a run's own ranks can reach"
    return Check("private-network", State.OK, round(taken_ms), "ms", advice)


def port_filter() -> Check:
    """Attaches a filter to a socket."""
    began_s = time.perf_counter()
    if refusal := filter_refusal():
        advice = (
            f"cannot be attached to a TCP socket ({refusal}); add CAP_NET_ADMIN, or let only the "
            "hosts of a run of several hosts reach each other: its ports accept anybody"
        )
        return absent("port-filter", advice)
    taken_us = (time.perf_counter() - began_s) * 1e6
    advice = "to close a port of a run to all but its hosts"
    return Check("port-filter", State.OK, round(taken_us), "us", advice)
