"""Writes the `run.json` of a run of `rrfp train`."""

from collections.abc import Sequence

from rrfp.trace.records import RankInfo
from rrfp.trace.run_dir import RunDir
from rrfp.trace.run_json import describe_run, describe_session
from rrfp.train.data.tokens import encoded
from rrfp.train.launch.private_network import told_network
from rrfp.train.settings import TrainSettings


def write_description(
    run: RunDir, settings: TrainSettings, ranks: Sequence[RankInfo], first_step: int = 0
) -> None:
    """Describe a run, of which this session begins with `first_step`; `ranks` is empty as long as
    they are unknown. A tokenizer is stated with its digest and vocabulary."""
    policy = settings.effective_policy.described()
    describe_run(
        run.run_json,
        settings.described(),
        policy,
        settings.layout.world_size,
        ranks,
        {**_network(), **_tokenizer(settings), **describe_session(run, first_step)},
    )


def _network() -> dict[str, object]:
    """The launcher, which describes the run first, has not made it yet."""
    told = told_network()
    return {"network": told} if told else {}


def _tokenizer(settings: TrainSettings) -> dict[str, object]:
    return (
        {} if settings.data.tokenizer is None else {"tokenizer": encoded(settings.data).tokenizer}
    )
