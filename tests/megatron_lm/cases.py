"""The cases: arguments of `pretrain_gpt.py`, and the schedules whose results must be equal."""

from dataclasses import dataclass

NATIVE = "native"
"""Megatron's own schedule, started as anybody starts it."""

RECORDED = "megatron"
"""The same through `rrfp run --dispatch megatron`."""

HINTS = ("bf", "bfw")

_MODEL = (
    "--transformer-impl local --hidden-size 32 --num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32 --attention-backend unfused"
)

_NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"

_ON_THE_CPU = (
    "--distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--no-create-attention-mask-in-dataloader --num-workers 0"
)

_TRAINING = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --micro-batch-size 1 "
    "--global-batch-size 8 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --log-interval 1 "
    "--eval-interval 100 --eval-iters 0 --log-num-zeros-in-grad"
)

_ITERATIONS = "--train-iters 4"

_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
    "--moe-token-dispatcher-type alltoall --disable-bias-linear"
)

_LLAMA = (
    "--swiglu --no-bias-swiglu-fusion --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --no-rope-fusion --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights"
)


_HYBRID = (
    "--spec hybrid_layers stack_spec --position-embedding-type rope --no-rope-fusion "
    "--untie-embeddings-and-output-weights"
)


@dataclass(frozen=True)
class Case:
    """One set of arguments on a number of ranks."""

    name: str
    what: str
    """For the table."""
    num_ranks: int
    arguments: str
    hints: tuple[str, ...] = HINTS
    reference: str = NATIVE
    resumptions: tuple[tuple[str, str], ...] = ()
    """The schedules before and after a checkpoint. Together they must give the results of the
    reference, which runs without a break."""
    iterations: str = _ITERATIONS
    layers: str = "--num-layers 4"
    dropout: str = _NO_DROPOUT
    script: str = "pretrain_gpt.py"
    """Arguments that some versions lack."""
    by_signal: bool = False
    """Whether SIGTERM, and not an argument, ends the run before the checkpoint."""
    needs_gloo_patch: bool = False
    """Megatron's own schedule relies on NCCL here; see `cpu`."""
    also_recorded: bool = False
    """Megatron's own schedule through `rrfp run`, too."""

    @property
    def all_arguments(self) -> list[str]:
        of_all = (_MODEL, _ON_THE_CPU, _TRAINING)
        own = (self.layers, self.iterations, self.dropout, self.arguments)
        return " ".join((*of_all, *own)).split()

    @property
    def schedules(self) -> list[tuple[str, ...]]:
        """The schedules compared with the reference: one, or one before and one after a
        checkpoint."""
        recorded = [(RECORDED,)] if self.also_recorded else []
        return [*((hint,) for hint in self.hints), *recorded, *self.resumptions]


def _across(before: tuple[str, ...], after: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((a, b) for a in before for b in after if (a, b) != (NATIVE, NATIVE))


CASES = (
    Case("pp2", "2 stages, tied embeddings", 2, "--pipeline-model-parallel-size 2",
         also_recorded=True),
    Case("pp4", "4 stages, a model like Llama, untied", 4,
         f"--pipeline-model-parallel-size 4 {_LLAMA}", also_recorded=True),
    Case("pp2-vpp2", "2 ranks of 2 chunks, tied", 2,
         "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
         needs_gloo_patch=True),
    Case("pp4-vpp2", "4 ranks of 2 chunks, untied", 4,
         "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 "
         "--untie-embeddings-and-output-weights", layers="--num-layers 8", needs_gloo_patch=True),
    Case("pp2-tp2-sp", "2 stages of 2 tensor-parallel ranks, sequence parallel", 4,
         "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    Case("pp2-dp2", "2 replicas", 4, "--pipeline-model-parallel-size 2"),
    Case("pp2-dp2-distributed-optimizer",
         "2 replicas, distributed optimizer, both overlaps", 4,
         "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
         "--overlap-param-gather --ddp-bucket-size 4000"),
    Case("pp2-vpp2-dp2-distributed-optimizer",
         "the same with 2 chunks a rank", 4,
         "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
         "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
         "--ddp-bucket-size 4000", needs_gloo_patch=True),
    Case("moe", "4 experts, losses for balance and z", 2,
         f"--pipeline-model-parallel-size 2 {_EXPERTS}", also_recorded=True),
    Case("moe-ep2", "experts spread over 2 replicas", 4,
         f"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {_EXPERTS}"),
    Case("moe-tp2-sp", "experts on 2 tensor-parallel ranks, sequence parallel", 4,
         f"--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
         f"{_EXPERTS}"),
    Case("mtp", "multi-token prediction", 2,
         "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --position-embedding-type rope "
         "--no-rope-fusion"),
    Case("per-token-loss", "`--calculate-per-token-loss`, 2 replicas", 4,
         "--pipeline-model-parallel-size 2 --calculate-per-token-loss --eod-mask-loss"),
    Case("first-stage-short", "`--decoder-first-pipeline-num-layers 1`", 2,
         "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
    Case("layout", "`--pipeline-model-parallel-layout`, uneven", 4,
         "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|tt|t|L"),
    Case("layout-vpp2", "the same on 2 ranks of 2 chunks", 2,
         "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|tt|t|tL",
         needs_gloo_patch=True),
    Case("rampup", "`--rampup-batch-size`", 2,
         "--pipeline-model-parallel-size 2 --rampup-batch-size 4 2 12",
         iterations="--train-samples 32"),
    Case("evaluation", "evaluation between steps", 2,
         "--pipeline-model-parallel-size 2 --eval-interval 2 --eval-iters 2"),
    Case("evaluation-vpp2", "the same with 2 chunks a rank", 2,
         "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
         "--eval-interval 2 --eval-iters 2", needs_gloo_patch=True),
    Case("recompute", "full recomputation", 2,
         "--pipeline-model-parallel-size 2 --recompute-granularity full "
         "--recompute-method uniform --recompute-num-layers 1"),
    Case("bf16", "bf16, gradients in fp32", 2, "--pipeline-model-parallel-size 2 --bf16"),
    Case("fp16", "fp16, a loss scale found during the run", 2,
         "--pipeline-model-parallel-size 2 --fp16 --initial-loss-scale 4194304 "
         "--loss-scale-window 2 --hysteresis 1"),
    Case("bf16-dp2-distributed-optimizer", "bf16, 2 replicas, distributed optimizer", 4,
         "--pipeline-model-parallel-size 2 --bf16 --use-distributed-optimizer"),
    Case("timers", "all of Megatron's timers, to TensorBoard; norms of parameters", 2,
         "--pipeline-model-parallel-size 2 --timing-log-level 2 --timing-log-option all "
         "--log-timers-to-tensorboard --log-params-norm --log-throughput "
         "--log-memory-to-tensorboard"),
    Case("straggler", "Megatron's straggler detector", 2,
         "--pipeline-model-parallel-size 2 --log-straggler --log-throughput "
         "--straggler-minmax-count 1 --straggler-ctrlr-port 0"),
    Case("rerun", "`--rerun-mode validate_results`: each step twice", 2,
         "--pipeline-model-parallel-size 2 --rerun-mode validate_results"),
    Case("checkpoint", "saved and loaded", 2,
         "--pipeline-model-parallel-size 2", hints=(),
         resumptions=_across((NATIVE, *HINTS), (NATIVE, *HINTS))),
    Case("sigterm", "saved because of SIGTERM, and loaded", 2,
         "--pipeline-model-parallel-size 2 --exit-signal-handler", hints=(), by_signal=True,
         resumptions=((NATIVE, "bf"), ("bf", NATIVE), ("bfw", "bf"))),
    # Without bf16, Megatron's distributed optimizer loads into parameters that autograd protects.
    Case("checkpoint-distributed-optimizer",
         "saved and loaded: bf16, 2 replicas, distributed optimizer, both overlaps", 4,
         "--pipeline-model-parallel-size 2 --bf16 --use-distributed-optimizer "
         "--overlap-grad-reduce --overlap-param-gather", hints=(),
         resumptions=((NATIVE, "bfw"), ("bfw", NATIVE), ("bf", "bfw"))),
    Case("checkpoint-vpp2", "saved and loaded: 2 chunks a rank", 2,
         "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", hints=(),
         resumptions=((NATIVE, "bfw"), ("bfw", NATIVE)), needs_gloo_patch=True),
    Case("dropout", "dropout, drawn as ours draw it", 2,
         "--pipeline-model-parallel-size 2", hints=("bfw",), reference="bf",
         resumptions=(("bf", "bfw"), ("bfw", "bf")), dropout=""),
    Case("dropout-recompute-tp2", "the same, recomputed, on 2 tensor-parallel ranks a stage", 4,
         "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
         "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
         hints=("bfw",), reference="bf", resumptions=(("bf", "bfw"),), dropout=""),
    Case("hybrid", "`pretrain_hybrid.py`: HybridModel in place of GPTModel", 2,
         f"--pipeline-model-parallel-size 2 {_HYBRID} --hybrid-layer-pattern *-*-|*-*-",
         layers="", script="pretrain_hybrid.py"),
    Case("hybrid-vpp2", "the same with 2 chunks a rank", 2,
         f"--pipeline-model-parallel-size 2 {_HYBRID} --hybrid-layer-pattern *-|*-|*-|*-",
         layers="", script="pretrain_hybrid.py", needs_gloo_patch=True),
)  # fmt: skip
