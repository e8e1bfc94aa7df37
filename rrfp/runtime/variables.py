"""The environment's variables by which a launcher tells ranks where to meet."""

STORE = "RRFP_STORE"
"""Where the run's store is: `file:PATH` on one host, `tcp:HOST:PORT` between hosts."""
ADDRESS = "RRFP_ADDRESS"
"""The address of this host at which its ranks listen, and at no other."""
LOOPBACK = "127.0.0.1"
