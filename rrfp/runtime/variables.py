"""The environment variables by which a launcher tells ranks where to meet, and who it is."""

STORE = "RRFP_STORE"
"""Where the run's store is: `file:PATH` on one host, `tcp:HOST:PORT` between hosts."""
ADDRESS = "RRFP_ADDRESS"
"""The only address of this host on which its ranks listen."""
LOOPBACK = "127.0.0.1"
LAUNCHER = "RRFP_LAUNCHER"
"""The launcher's pid. A rank that asked for its parent would take another process for its launcher
if that had died before it asked."""
WARNINGS = "RRFP_WARNINGS"
"""The pipe to the launcher for what its ranks warn of."""
LIVENESS = "RRFP_LIVENESS"
"""The descriptors, `PAGE,STACKS`, of the files by which a rank shows its launcher that it lives."""
