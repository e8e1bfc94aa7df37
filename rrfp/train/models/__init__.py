"""The models of `rrfp train`, stage by stage."""
