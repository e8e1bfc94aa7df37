"""`rrfp train`: train a Megatron GPT over a pipeline and record every dispatch and wait."""

import json
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.errors import RrfpError, UsageError
from rrfp.megatron.settings import DispatchMode, TrainSettings
from rrfp.runtime.pace import MOST_OVER_PACE
from rrfp.schedule.dispatcher import DEFAULT_LIMIT
from rrfp.schedule.hints import HINT_NAMES

if TYPE_CHECKING:
    from rrfp.trace.rundir import RunDir


_DEFAULTS = {field.name: field.default for field in fields(TrainSettings)}


def _flag(help_text: str, *names: str, **options: Any) -> Any:
    """An option whose default is the settings' own, so that a TOML file can give it too."""
    # In help texts [bf] would be a style, which is not shown.
    return typer.Option(*names, help=help_text.replace("[", r"\["), show_default=False, **options)


def _setting(name: str, help_text: str, **options: Any) -> Any:
    """The same, and the help tells the default."""
    return _flag(f"{help_text} [{_DEFAULTS[name]}].", **options)


def train(
    hint: Annotated[
        str | None,
        _flag(f"{', '.join(HINT_NAMES)}, or an order file (.csv) [bf]."),
    ] = None,
    dispatch: Annotated[
        str | None,
        _flag(
            "ready (default: the hint ranks what is ready), fixed (its order binds) or megatron "
            "(Megatron-Core's own 1F1B, or interleaving with --chunks)."
        ),
    ] = None,
    pp: Annotated[int | None, _setting("pp", "Pipeline ranks")] = None,
    tp: Annotated[int | None, _setting("tp", "Tensor-parallel ranks")] = None,
    dp: Annotated[
        int | None, _flag("Data-parallel replicas [as many as --ep spans, or 1].")
    ] = None,
    cp: Annotated[
        int | None, _flag("Context-parallel ranks; more than 1 needs Transformer Engine [1].")
    ] = None,
    ep: Annotated[
        int | None, _setting("ep", "Replicas that share out the experts; a divisor of --dp")
    ] = None,
    chunks: Annotated[int | None, _setting("chunks", "Model chunks a pipeline rank")] = None,
    placement: Annotated[
        str | None,
        _flag(
            "Where chunks lie: loop (default: Megatron's interleaving) or v (there and back, with "
            "--chunks 2)."
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        _flag("Divide norms and dropout along the sequence, with --tp.", "--sequence-parallel"),
    ] = None,
    microbatches: Annotated[
        int | None, _setting("microbatches", "Microbatches a step and replica")
    ] = None,
    micro_batch_size: Annotated[
        int | None, _setting("micro_batch_size", "Sequences a microbatch")
    ] = None,
    seq_length: Annotated[int | None, _setting("seq_length", "Tokens a sequence")] = None,
    model: Annotated[
        str | None,
        _flag(
            "gpt (default: text), vlm (images, then text), moe (a gpt with experts) or mlp (a gpt "
            "without attention, for --pace)."
        ),
    ] = None,
    layers: Annotated[
        int | None, _setting("layers", "Transformer layers, a multiple of --pp x --chunks")
    ] = None,
    hidden: Annotated[int | None, _setting("hidden", "Hidden size")] = None,
    heads: Annotated[int | None, _setting("heads", "Attention heads, a multiple of --tp")] = None,
    experts: Annotated[
        int | None, _flag("Experts a layer, of which a token takes 2 [moe: 4; else dense layers].")
    ] = None,
    tie_embeddings: Annotated[
        bool | None,
        _flag("Use the embedding's weight for the output too.", "--tie-embeddings"),
    ] = None,
    dropout: Annotated[
        float | None, _setting("dropout", "Share of hidden and attention values dropped")
    ] = None,
    dtype: Annotated[str | None, _flag("fp32 (default) or bf16; gradients stay in fp32.")] = None,
    recompute: Annotated[
        str | None, _flag("Activations to compute twice: none (default), selective or full.")
    ] = None,
    distributed_optimizer: Annotated[
        bool | None,
        _flag("Divide the optimizer's state among the replicas.", "--distributed-optimizer"),
    ] = None,
    lr: Annotated[float | None, _setting("lr", "Learning rate")] = None,
    steps: Annotated[int | None, _flag("Steps [60; vlm: 240].")] = None,
    limit: Annotated[
        int | None,
        _flag(
            f"Forwards a rank may run ahead of its backwards [{DEFAULT_LIMIT} if ready without "
            "--hold]."
        ),
    ] = None,
    hold: Annotated[
        int | None, _flag("Most microbatches whose activations a rank keeps; instead of --limit.")
    ] = None,
    w: Annotated[
        str | None,
        _flag(
            "Weight gradients of an order used as a hint: idle (default: when nothing else is "
            "ready) or ranked (at their places)."
        ),
    ] = None,
    agreement: Annotated[
        str | None,
        _flag(
            "What ranks that share collectives run: intersection (default: the best that all have "
            "ready) or unanimous (what all would pick)."
        ),
    ] = None,
    grad_order: Annotated[
        str | None,
        _flag(
            "How gradients add up: canonical (default: by microbatch, the same to the bit) or "
            "arrival (as they come)."
        ),
    ] = None,
    admit: Annotated[
        str | None,
        _flag(
            "The order in which a step's microbatches enter: given (default), pyramid (light, "
            "heavy, light) or a file with a line a step."
        ),
    ] = None,
    admit_cost: Annotated[
        str | None,
        _flag(
            "What a microbatch weighs in the pyramid: work (default), tokens, patches or "
            "MODULE:FUNCTION, which takes its batch."
        ),
    ] = None,
    seed: Annotated[int | None, _setting("seed", "Seed of parameters, data and dropout")] = None,
    data: Annotated[
        Path | None,
        _flag(
            "Text file, folder, JSONL with a 'text' field, or Megatron .bin/.idx pair [Python's "
            "standard library]; for --model vlm a folder with images and a JSONL of 'image' and "
            "'text' [scenes drawn at run time]."
        ),
    ] = None,
    variable_lengths: Annotated[
        bool | None,
        _flag("Give every microbatch the length of its own documents.", "--variable-lengths"),
    ] = None,
    pace: Annotated[
        str | None,
        _flag(
            "Stretch tasks and messages to language, multimodal or uniform costs, or to those of a "
            "CSV or TOML file or of a run [none]."
        ),
    ] = None,
    jitter: Annotated[
        str | None, _flag("none (default), J0 to J3, lognormal:0.5, ...: see docs/costs.md.")
    ] = None,
    max_images: Annotated[
        int | None, _setting("max_images", "Most images a microbatch of --model vlm")
    ] = None,
    image_size: Annotated[
        int | None, _setting("image_size", "Longest edge of an image, in pixels")
    ] = None,
    patch_size: Annotated[int | None, _setting("patch_size", "Edge of a patch, in pixels")] = None,
    blank_images: Annotated[
        bool | None,
        _flag("Show grey instead of the images, to see what they are worth.", "--blank-images"),
    ] = None,
    heldout_every: Annotated[
        int | None,
        _flag("Steps between evaluations on held-out images [after the last step only]."),
    ] = None,
    device: Annotated[str | None, _flag("cpu, the only device of this version.")] = None,
    out: Annotated[
        Path | None,
        _flag("The run's directory; none means runs/<time>-<hint>, linked as runs/latest."),
    ] = None,
    force: Annotated[bool | None, _flag("Replace the run in --out.", "--force")] = None,
    config: Annotated[
        Path | None, _flag("TOML file of these names; flags go first.", metavar="FILE")
    ] = None,
    no_trace: Annotated[bool | None, _flag("Record nothing.", "--no-trace")] = None,
    nnodes: Annotated[int | None, _setting("nnodes", "Hosts of the run")] = None,
    node_rank: Annotated[int | None, _setting("node_rank", "This host's number")] = None,
    rdzv_endpoint: Annotated[
        str | None, _flag("Where the hosts meet: a free port of host 0.", metavar="HOST:PORT")
    ] = None,
) -> None:
    """Train a Megatron GPT readiness-first and trace it.

    Without flags: 4 pipeline stages on this machine's CPU, on the source text
    of Python's standard library, for about a minute.
    The run's directory holds run.json, metrics.jsonl and trace.pftrace.

    Example: rrfp train --hint bf --pp 4 --steps 20
    """
    given = {name: value for name, value in locals().items() if value is not None}
    given.pop("config", None)
    settings = _settings(config, given)
    _check_hint(settings)
    _check_admission(settings)
    _check_pace(settings)
    _run(settings)


def _settings(config: Path | None, given: dict[str, Any]) -> TrainSettings:
    """What the flags and the file say, checked: nothing has been started yet."""
    from rrfp.megatron.data_source import check_data

    settings = (
        TrainSettings(**given) if config is None else TrainSettings.from_toml(config, **given)
    )
    settings.validate()
    check_data(settings)
    return settings


def _check_hint(settings: TrainSettings) -> None:
    from rrfp.hint_files import resolve_hint
    from rrfp.schedule.dispatcher import WeightGradients, check_weight_gradients
    from rrfp.schedule.rehearsal import check_binding, order_of

    shape = settings.shape
    hint = resolve_hint(settings.resolved_hint, shape)
    check_weight_gradients(WeightGradients(settings.w), hint)
    # Megatron's own schedule binds as much as a fixed order does.
    if settings.dispatch != DispatchMode.READY:
        hold = None if settings.hold is None else settings.hold * settings.chunks
        check_binding(order_of(hint, shape), settings.limit, hold)


def _check_admission(settings: TrainSettings) -> None:
    from rrfp.admission_files import resolve_admission
    from rrfp.megatron.item_costs import resolve_cost

    resolve_admission(settings.admit, settings.microbatches)
    resolve_cost(settings.admit_cost)


def _check_pace(settings: TrainSettings) -> None:
    from rrfp.megatron.pacing import check_pace
    from rrfp.simulate.cost_files import costs_file
    from rrfp.trace.rundir import RunDir

    check_pace(settings)
    if settings.force and settings.out is not None and settings.pace is not None:
        costs = costs_file(settings.pace)
        if costs is not None and costs.resolve() == RunDir(settings.out).trace.resolve():
            raise UsageError(
                f"--force removes the run in {settings.out} and --pace takes its times; choose "
                "another directory with --out"
            )


def _run(settings: TrainSettings) -> None:
    from rrfp.cli.live import TrainDisplay
    from rrfp.megatron.description import write_description
    from rrfp.megatron.launch import launch
    from rrfp.simulate.cost_files import settled
    from rrfp.trace.rundir import RunDir, create_run_dir

    if settings.node_rank > 0:
        assert settings.out is not None
        typer.echo(
            f"Host {settings.node_rank} of {settings.nnodes} joins host 0 at "
            f"{settings.rdzv_endpoint}, which shows how the run goes",
            err=True,
        )
        launch(settings, RunDir(settings.out))
        return
    if settings.nnodes == 1 and settings.pace is not None:
        # It may name the newest run, which this one is about to become.
        settings = replace(settings, pace=settled(settings.pace))
    run = create_run_dir(settings.out, settings.force, settings.resolved_hint)
    write_description(run.run_json, settings, ())
    try:
        with TrainDisplay(run.metrics, settings):
            launch(settings, run)
    except (RrfpError, KeyboardInterrupt):
        _encode_what_is_there(run)
        raise
    _report(run, settings)


def _report(run: "RunDir", settings: TrainSettings) -> None:
    """What a run that came to its end has to show, and where to look next."""
    _tell_pace(run)
    _tell_heldout(run)
    if settings.no_trace:
        typer.echo(
            f"Trained {settings.num_steps} steps; the metrics are in {run.metrics}", err=True
        )
        return
    from rich.console import Console

    from rrfp.analyze.bubbles import bubbles
    from rrfp.analyze.cache import load_frames
    from rrfp.cli.tables import bubble_table
    from rrfp.trace.merge import encode_run

    trace = encode_run(run.path)
    Console().print(bubble_table(bubbles(load_frames(trace))))
    rrfp = _program()
    where = "" if settings.out is None else f" {run.path}"
    typer.echo(f"The trace is {trace}", err=True)
    typer.echo(f"Next: {rrfp} trace view{where}", err=True)
    typer.echo(f"      {rrfp} analyze bubbles{where} --steps 1:", err=True)


def _tell_pace(run: "RunDir") -> None:
    """Say how many tasks of a paced run took longer than their model."""
    lines = run.metrics.read_text(encoding="utf-8").splitlines()
    steps = [over for line in lines if (over := json.loads(line)["over_pace"]) is not None]
    if not steps:
        return
    num_over, num_tasks = (sum(over[name] for over in steps) for name in ("tasks", "of"))
    worst_ms = max(over["worst_s"] for over in steps) * 1e3
    sentence = (
        f"the work of {num_over} of {num_tasks} tasks ({num_over / num_tasks:.2%}) took longer "
        "than its model"
    )
    if num_over:
        sentence += f", by {worst_ms:.1f} ms at most"
    if num_over > MOST_OVER_PACE * num_tasks:
        sentence = (
            f"Warning: {sentence}; the times of this run are not its model's; use a smaller model "
            "or longer tasks"
        )
    typer.echo(sentence, err=True)


def _tell_heldout(run: "RunDir") -> None:
    """Say how well the trained model does on what it has not seen."""
    last_line = run.metrics.read_text(encoding="utf-8").splitlines()[-1]
    loss = json.loads(last_line)["heldout_loss"]
    if loss is not None:
        typer.echo(f"Held-out loss {loss:.4f}", err=True)


def _encode_what_is_there(run: "RunDir") -> None:
    """Merge what a run that failed has recorded, and say where it is."""
    from rrfp.trace.merge import encode_run

    if not run.records.is_dir():
        return
    try:
        trace = encode_run(run.path)
    except RrfpError as error:
        typer.echo(f"No trace could be made: {error}", err=True)
    else:
        typer.echo(f"The trace of the finished steps is {trace}", err=True)


def _program() -> str:
    """How the user can call this program again; its directory may not be on the PATH."""
    called = Path(sys.argv[0])
    if called.name != "rrfp":
        return f"{sys.executable} -m rrfp"
    found = shutil.which("rrfp")
    is_found = found is not None and Path(found).resolve() == called.resolve()
    return "rrfp" if is_found else str(called)
