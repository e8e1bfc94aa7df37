"""How the tensors of a message reach its receiver: the sender's outbox, and what pulls from it."""
