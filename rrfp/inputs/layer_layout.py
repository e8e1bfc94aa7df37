"""How many layers each stage has, as a user writes it: in Megatron's notation for
`--pipeline-model-parallel-layout`, or as plain numbers."""

import re
from collections.abc import Sequence

from rrfp.errors import UsageError

_MOST = 10_000
"""Letters of a layout without its abbreviations; more is a typing error."""
_EXAMPLE = "'Et*3|t*4|t*4|t*3L' or 3,4,4,3"


def parse_layout(text: str, name: str) -> tuple[int, ...]:
    """The layers of each stage, in model order; `name` is what errors call the text.

    Megatron's letters: E embedding, t layer, L loss, | next stage, `t*4` and `(tt|)*2` repeat, and
    commas are for the eye. Raises UsageError for anything else, and for an embedding or a loss that
    is not at its end.
    """
    if re.fullmatch(r"\d{1,4}(,\d{1,4})*", text, re.ASCII):
        return tuple(map(int, text.split(",")))
    letters = _unrolled(text.replace(",", ""))
    if letters is None or set(letters) - set("EtL|"):
        raise UsageError(
            f"{name} is '{text:.60}'; write the layers of each stage, as in {_EXAMPLE}"
        )
    if letters[:1] + letters[-1:] != "EL" or letters.count("E") + letters.count("L") != 2:
        raise UsageError(
            f"{name} is '{text:.60}'; it must begin with the embedding, E, and end with the loss, "
            f"L, as in {_EXAMPLE}"
        )
    return tuple(stage.count("t") for stage in letters.split("|"))


def layout_string(split: Sequence[int]) -> str:
    """Layers by stage in Megatron's notation, as short as it is easy to read."""
    stages = ["t" * layers if layers < 2 else f"t*{layers}" for layers in split]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages)


def _unrolled(text: str) -> str | None:
    """The text without repetitions, as Megatron unrolls them: those in parentheses first; None for
    one that is far too long."""
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        length = len(text) + sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, text))
        if length > _MOST:
            return None
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text
