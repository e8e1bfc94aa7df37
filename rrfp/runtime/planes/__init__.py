"""Data planes, which carry large tensors: the sender's outbox, and fetchers that read from it."""
