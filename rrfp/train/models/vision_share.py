"""How a multimodal model is divided between vision and language. Imports no torch."""

_VISION_SHARE = 3 / 8
"""The share of stages that are vision stages, as in the simulator's `multimodal` costs."""


def num_vision_stages(num_stages: int) -> int:
    """How many stages, from the first on, are vision stages."""
    return max(1, int(_VISION_SHARE * num_stages + 0.5))
