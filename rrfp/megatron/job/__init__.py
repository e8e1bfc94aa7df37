"""A user's training job: replaces its schedule and records its steps."""
