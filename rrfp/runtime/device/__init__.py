"""The device under a rank's tensors, behind one small seam."""
