"""One colour a kind and a cause, and every reader can tell any two apart."""

import math
from itertools import combinations

import pytest

from rrfp.analyze.bubbles import CAUSES
from rrfp.analyze.colors import CAUSE_COLOURS, KIND_COLOURS, LINK_COLOUR
from rrfp.schedule.tasks import Kind

Triple = tuple[float, float, float]

EYES: dict[str, tuple[Triple, Triple, Triple]] = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no green": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}
"""What is left of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1)."""

LEAST = 10.0
"""CIEDE2000; 2.3 is just noticeable."""


def lab(colour: str, eye: tuple[Triple, Triple, Triple]) -> Triple:
    """CIE L*a*b* of `#RRGGBB`, as an eye sees it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in eye]
    to_xyz = (
        (0.4124564, 0.3575761, 0.1804375),
        (0.2126729, 0.7151522, 0.0721750),
        (0.0193339, 0.1191920, 0.9503041),
    )
    white = (0.95047, 1.0, 1.08883)
    ratios = [
        sum(a * b for a, b in zip(row, seen, strict=True)) / most
        for row, most in zip(to_xyz, white, strict=True)
    ]
    x, y, z = (r ** (1 / 3) if r > 216 / 24389 else (24389 / 27 * r + 16) / 116 for r in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(first: Triple, second: Triple) -> float:
    """CIEDE2000 (Sharma, Wu and Dalal 2005)."""
    (l1, a1, b1), (l2, a2, b2) = first, second
    chroma = ((math.hypot(a1, b1) + math.hypot(a2, b2)) / 2) ** 7
    g = 0.5 * (1 - math.sqrt(chroma / (chroma + 25**7)))
    a1, a2 = a1 * (1 + g), a2 * (1 + g)
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn, mean_h = h2 - h1, (h1 + h2) / 2
    if abs(turn) > 180:
        turn -= math.copysign(360, turn)
        mean_h += 180 if mean_h < 180 else -180
    if not c1 * c2:
        turn, mean_h = 0.0, h1 + h2
    mean_l, mean_c = (l1 + l2) / 2, (c1 + c2) / 2
    t = (
        1
        - 0.17 * math.cos(math.radians(mean_h - 30))
        + 0.24 * math.cos(math.radians(2 * mean_h))
        + 0.32 * math.cos(math.radians(3 * mean_h + 6))
        - 0.20 * math.cos(math.radians(4 * mean_h - 63))
    )
    light = (l2 - l1) / (1 + 0.015 * (mean_l - 50) ** 2 / math.sqrt(20 + (mean_l - 50) ** 2))
    chromatic = (c2 - c1) / (1 + 0.045 * mean_c)
    hue = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2)) / (1 + 0.015 * mean_c * t)
    rotation = (
        -2
        * math.sqrt(mean_c**7 / (mean_c**7 + 25**7))
        * math.sin(math.radians(60 * math.exp(-(((mean_h - 275) / 25) ** 2))))
    )
    return math.sqrt(light**2 + chromatic**2 + hue**2 + rotation * chromatic * hue)


@pytest.mark.parametrize(
    ("first", "second", "known"),
    [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ],
)
def test_distances_are_those_that_are_published(
    first: Triple, second: Triple, known: float
) -> None:
    assert distance(first, second) == pytest.approx(known, abs=1e-4)


@pytest.mark.parametrize("eye", EYES)
def test_no_two_colours_look_alike(eye: str) -> None:
    colours = KIND_COLOURS | CAUSE_COLOURS
    seen = {name: lab(colour, EYES[eye]) for name, colour in colours.items()}
    near = {
        f"{a} and {b}": round(distance(seen[a], seen[b]), 1)
        for a, b in combinations(seen, 2)
        if distance(seen[a], seen[b]) < LEAST
    }
    assert near == {}


def test_every_kind_and_cause_has_a_colour() -> None:
    assert list(KIND_COLOURS) == list(Kind)
    assert list(CAUSE_COLOURS) == list(CAUSES)
    assert LINK_COLOUR in CAUSE_COLOURS.values()


@pytest.mark.parametrize("ground", ["#ffffff", "#14181d"])
def test_all_are_seen_on_light_and_on_dark_ground(ground: str) -> None:
    eye = EYES["all colours"]
    for colour in (KIND_COLOURS | CAUSE_COLOURS).values():
        assert distance(lab(colour, eye), lab(ground, eye)) > LEAST
