"""Items of a data iterator as bytes and back: their structure as JSON, then their tensors' numbers.

What is read back is never executed. Tensors arrive contiguous, and take nothing else of their
storage along: a row of a table would take the whole table.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import torch

from rrfp.errors import UsageError
from rrfp.runtime.decoding import integers, items, parsed, text

_LENGTH_BYTES = 8


def packed(value: object) -> bytes:
    """Raises UsageError for a value with anything but tensors, numbers and text in dicts, lists and
    tuples."""
    tensors: list[torch.Tensor] = []
    tree = _told(value, tensors)
    forms = [[str(each.dtype), [*each.shape], each.is_cuda] for each in tensors]
    header = json.dumps([tree, forms]).encode()
    numbers = b"".join(map(_numbers, tensors))
    return len(header).to_bytes(_LENGTH_BYTES, "big") + header + numbers


def unpacked(parcel: bytes, device: torch.device) -> Any:
    """The value, its tensors on the CPU or, where they were on a GPU, on `device`. Raises
    ValueError for bytes that `packed` did not make."""
    end = _LENGTH_BYTES + int.from_bytes(parcel[:_LENGTH_BYTES], "big")
    tree, forms = items(parsed(parcel[_LENGTH_BYTES:end]), 2)
    tensors = []
    for form in items(forms):
        name, shape, was_on_gpu = items(form, 3)
        dtype = getattr(torch, text(name).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is not a type of numbers")
        start, end = end, end + math.prod(integers(shape)) * dtype.itemsize
        numbers = bytearray(parcel[start:end])
        if len(numbers) != end - start:
            raise ValueError("a tensor is cut short")
        flat = torch.frombuffer(numbers, dtype=torch.uint8) if numbers else torch.empty(0)
        tensor = (flat.view(dtype) if numbers else flat.to(dtype)).reshape(integers(shape))
        tensors.append(tensor.to(device) if was_on_gpu else tensor)
    return _value(tree, iter(tensors))


def _told(value: object, tensors: list[torch.Tensor]) -> object:
    """The value as JSON, with a letter for what JSON has no word for; tensors go into the list."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensors.append(value.detach())
        return ["tensor"]
    if isinstance(value, dict) and type(value) is dict:
        pairs = [[_told(key, tensors), _told(each, tensors)] for key, each in value.items()]
        return ["dict", pairs]
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return [type(value).__name__, [_told(each, tensors) for each in value]]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UsageError(
        f"a {type(value).__name__} in an item of the data iterator cannot be sent to another "
        "replica, as admit_across would; give tensors, numbers and text, in dicts, lists or "
        "tuples, or leave admit_across out"
    )


def _value(tree: object, tensors: Iterator[torch.Tensor]) -> Any:
    if not isinstance(tree, list):
        return tree
    match tree:
        case ["tensor"] if (tensor := next(tensors, None)) is not None:
            return tensor
        case ["dict", pairs]:
            told = [items(pair, 2) for pair in items(pairs)]
            return {_value(key, tensors): _value(each, tensors) for key, each in told}
        case ["list", members]:
            return [_value(each, tensors) for each in items(members)]
        case ["tuple", members]:
            return tuple(_value(each, tensors) for each in items(members))
        case ["bytes", digits]:
            return bytes.fromhex(text(digits))
    raise ValueError(f"{tree!r:.40} is not of this form")


def _numbers(tensor: torch.Tensor) -> bytes:
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
