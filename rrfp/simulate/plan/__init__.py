"""The order in which a step's microbatches enter, planned by simulating the step before it."""
