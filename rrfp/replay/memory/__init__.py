"""What the microbatches of a recorded run keep in memory, and what they keep in changed replays."""
