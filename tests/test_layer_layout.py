"""Which layers lie on which stage, in Megatron's notation."""

import random

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from rrfp.errors import UsageError
from rrfp.inputs import layout_string, parse_layout


class TestLayouts:
    """Megatron's notation."""

    def test_megatron_reads_the_same(self) -> None:
        draw = random.Random(1)
        for _ in range(50):
            split = tuple(draw.randrange(5) for _ in range(draw.randrange(2, 9)))
            text = layout_string(split)
            assert parse_layout(text, "it") == split
            rows = PipelineParallelLayerLayout.parse_str_to_list(text)
            assert [sum(each.name == "decoder" for each in row) for row in rows] == list(split)

    @pytest.mark.parametrize("text", ["Et*3|t|L", "Ettt|(tt|)*29,t|L", "E|(t*2|)*3t,tL"])
    def test_what_megatron_unrolls(self, text: str) -> None:
        rows = PipelineParallelLayerLayout.parse_str_to_list(text)
        expected = tuple(sum(each.name == "decoder" for each in row) for row in rows)
        assert parse_layout(text, "it") == expected

    @pytest.mark.parametrize("text", ["", "tt|tt", "Ett|tt", "EttL|tt", "Etx|tL", "Et*99999|tL"])
    def test_others_are_refused(self, text: str) -> None:
        with pytest.raises(UsageError, match="--layout is"):
            parse_layout(text, "--layout")
