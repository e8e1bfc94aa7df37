"""The devices on which a rank's tensors lie: the interface, the CPU, and CUDA."""
