"""The schedule floor: tasks, hints, orders, backpressure and the dispatcher. Pure; stdlib only."""
