"""`rrfp watch`: the command, its page, and what it says line by line."""
