"""The costs of tasks and messages, in each form that a user can write."""
