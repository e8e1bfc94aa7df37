"""The runtime floor: one rank's worker, its transport, its agreement and its recorder."""
