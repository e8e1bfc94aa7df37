"""What tensors live on and are copied by."""
