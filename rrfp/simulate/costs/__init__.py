"""What tasks and messages are known to cost, in each form that a user can write."""
