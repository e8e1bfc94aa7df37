"""The environment variables by which a launcher tells ranks where to meet."""

STORE = "RRFP_STORE"
"""Where the run's store is: `file:PATH` on one host, `tcp:HOST:PORT` between hosts."""
ADDRESS = "RRFP_ADDRESS"
"""The only address of this host on which its ranks listen."""
LOOPBACK = "127.0.0.1"
