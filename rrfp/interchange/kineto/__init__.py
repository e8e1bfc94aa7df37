"""A run read from the profiles of torch.profiler (Kineto), a file a rank."""
