"""Refuses models and settings that cannot run out of Megatron's order, before the first task."""

from collections.abc import Sequence
from typing import Any

from rrfp.errors import UsageError
from rrfp.megatron.adapters.global_state import tracker_of_generators
from rrfp.megatron.adapters.models import attribute_of
from rrfp.megatron.step.microbatch_data import is_iterator, shared_objects
from rrfp.megatron.step.weight_gradients import describe_hook, unreachable_hook
from rrfp.runtime.net.transport import check_device
from rrfp.schedule.rehearsal import StepPolicy, hints_in_order
from rrfp.schedule.tasks import Kind

_REFUSED = {
    "overlap_moe_expert_parallel_comm": "overlapped expert communication pairs tasks by a schedule",
    "hybrid_context_parallel": "hybrid context parallelism orders microbatches itself",
    "num_microbatches_with_partial_activation_checkpoints": (
        "partial checkpointing counts microbatches in schedule order"
    ),
    "fp4": "its rounding is drawn in the order in which the tasks run",
    "fine_grained_activation_offloading": (
        "it brings back for a backward what is next in one queue of all microbatches, in the order "
        "of the schedule's first step"
    ),
    "moe_paged_stash": "it keeps experts' activations in pages by the schedule's order",
    "overlap_dispatch_backward_with_experts_wgrad": (
        "it runs weight gradients of experts beside the schedule's tasks"
    ),
    "cpu_offloading": "it brings activations back in the reverse order of the forwards",
}


def refuse(config: Any, models: Sequence[Any], step_policy: StepPolicy, pp_rank: int) -> None:
    """Raise UsageError if a configuration or a model chunk cannot run out of Megatron's order under
    this policy, if its device has no transport, or if the chunks were not built for the stages of
    this pipeline rank. Tests settings first, then modules, parameters and placement."""
    for name, reason in _REFUSED.items():
        value = getattr(config, name, None)
        # The number 0 counts as set.
        if value is not None and value is not False:
            raise UsageError(f"{name} cannot run readiness-first: {reason}; switch it off")
    if getattr(config, "cuda_graph_impl", "none") != "none":
        raise UsageError(
            f"cuda_graph_impl {config.cuda_graph_impl} cannot run readiness-first: all graphs share"
            " one pool of memory by the order in which they were captured, and in another order one"
            " overwrites what a microbatch still needs; set it to none"
        )
    _refuse_shared_random_states(config)
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if getattr(config, name, 1) > 1:
            raise UsageError(
                f"{name} {getattr(config, name)} cannot run readiness-first: ranks gather each "
                "other's weights ahead, in the order of a fixed schedule; leave "
                "tensor_parallel_num_weight_shards at the tensor-parallel size"
            )
    refuse_stateful(models, config)
    for model in models:
        for parameter in model.parameters():
            check_device(parameter.device)
        _refuse_sharded(model)
    _refuse_two_embeddings_on_a_rank(config, models, step_policy)
    for chunk, model in enumerate(models):
        _refuse_misplaced(model, chunk, step_policy, pp_rank)
    if Kind.B in step_policy.shape.kinds:
        _refuse_other_splits(config, step_policy)
    if step_policy.shape.splits_backward:
        for model in models:
            _refuse_lost_hooks(model)


def refuse_stateful(chunks: Sequence[Any], config: Any) -> None:
    """Raise UsageError for a model in which a microbatch's forward reads state that another one
    wrote (scales of FP8, running statistics, routes), because the result would depend on the order
    of tasks. Modules in evaluation mode pass."""
    # A plain ModelParallelConfig has neither attribute.
    has_fp8 = bool(getattr(config, "fp8", None))
    recipe = getattr(config, "fp8_recipe", None) if has_fp8 else None
    if recipe in ("delayed", "custom"):
        raise UsageError(
            f"fp8_recipe {str.__str__(recipe)} cannot run readiness-first: it scales a "
            "microbatch by what earlier ones held; choose tensorwise, blockwise or mxfp8"
        )
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if has_fp8 and getattr(config, name, False):
            raise UsageError(
                f"{name} cannot run readiness-first: under every recipe Transformer Engine scales "
                "the attention's scores by what earlier microbatches held; switch it off"
            )
    for chunk in chunks:
        for name, module in chunk.named_modules():
            for attribute, (what, next_step) in _STATEFUL.items():
                if module.training and getattr(module, attribute, None) is not None:
                    raise UsageError(
                        f"{name} cannot run readiness-first: {what} follow the order of the "
                        f"microbatches; {next_step}"
                    )


_STATEFUL = {
    "running_mean": ("its running statistics", "switch track_running_stats off"),
    "global_tokens_per_expert": (
        "the running counts of its global_aux_loss",
        "choose aux_loss or seq_aux_loss",
    ),
    "qb_beta_accum": (
        "the running averages of its quantile balancing",
        "choose aux_loss or seq_aux_loss",
    ),
    "router_replay": ("the routes that it records", "switch moe_enable_routing_replay off"),
}
"""By attribute of a module: the state that depends on the order of tasks, and the remedy."""


def refuse_data(
    given: Sequence[Any], step_policy: StepPolicy, reason: str, *, keeps_order: bool
) -> None:
    """Raise UsageError for data objects that must be iterators and are not; None passes. They must
    be iterators if several chunks draw from one object, and without `keeps_order`: microbatches are
    reordered, or the setting `reason` looks at items before they are used."""
    for each in shared_objects(given):
        if not is_iterator(each):
            raise UsageError(
                f"several chunks share one {type(each).__name__} as their data, and it has no "
                "__next__ to draw from it in Megatron's order; give each chunk one of its own"
            )
    for each in () if keeps_order else given:
        if each is None or is_iterator(each):
            continue
        fact = f"the data iterator, a {type(each).__name__}, has no __next__"
        if step_policy.keeps_microbatch_order:
            raise UsageError(
                f"{fact}, and {reason} takes its items before their microbatches run; leave it "
                "out, or pass an iterator of one item per microbatch"
            )
        hints = ", ".join(hints_in_order(step_policy.shape))
        raise UsageError(
            f"{fact}, and {step_policy.hint_name} takes microbatches in another order than they "
            f"come in; choose a hint that keeps it ({hints}), or pass an iterator of one item per "
            "microbatch"
        )


def _refuse_other_splits(config: Any, step_policy: StepPolicy) -> None:
    """Raise UsageError if the configuration sets `defer_embedding_wgrad_compute` and the policy
    splits the backward or reorders microbatches, or if it sets `delay_wgrad_compute` and the policy
    does not split the backward."""
    name, splits = step_policy.hint_name, step_policy.shape.splits_backward
    if getattr(config, "defer_embedding_wgrad_compute", False) and (
        splits or not step_policy.keeps_microbatch_order
    ):
        raise UsageError(
            f"defer_embedding_wgrad_compute cannot follow {name}: it pairs forwards and backwards "
            "by their sequence and holds its gradients back itself; switch it off"
        )
    if getattr(config, "delay_wgrad_compute", False) and not splits:
        raise UsageError(
            f"delay_wgrad_compute splits the backward, which {name} does not; switch it off, or "
            "choose a hint that does, such as bfw"
        )


def _refuse_lost_hooks(model: Any) -> None:
    """Raise UsageError if a weight whose gradient Transformer Engine delays has a hook, which would
    not see the gradient."""
    found = unreachable_hook(model)
    if found is not None:
        name, hook = found
        raise UsageError(
            f"{name} has {describe_hook(hook)}, which would not see the gradient that Transformer "
            "Engine keeps for it; switch delay_wgrad_compute off, or remove the hook"
        )


def _refuse_shared_random_states(config: Any) -> None:
    """Raise UsageError if activations are recomputed and Megatron's random states are generators,
    which it restores by reference, as later tasks have left them."""
    tracker = tracker_of_generators()
    if tracker is not None and getattr(config, "recompute_granularity", None):
        raise UsageError(
            f"recomputed activations draw from the random states of {tracker}, which"
            " Megatron-Core brings back by reference, as later tasks have left them; leave "
            "te_rng_tracker and use_cudagraphable_rng off, or recompute_granularity out"
        )


def _refuse_misplaced(model: Any, chunk: int, step_policy: StepPolicy, pp_rank: int) -> None:
    """Raise UsageError if a chunk's `pre_process` or `post_process` does not match its stage, the
    first or the last one. A model without these attributes passes."""
    shape = step_policy.shape
    stage = shape.stage_of(pp_rank, chunk)
    for attribute, is_there in (
        ("pre_process", stage == 0),
        ("post_process", stage == shape.num_stages - 1),
    ):
        built = attribute_of(model, attribute)
        if built is not None and bool(built) != is_there:
            raise UsageError(
                f"chunk {chunk} of pipeline rank {pp_rank} was built with {attribute} {built}, and "
                f"is stage {stage} of {shape.num_stages} with placement {shape.placement}; build "
                "it for that stage, or choose the placement that it was built for"
            )


def _refuse_sharded(model: Any) -> None:
    """Raise UsageError for a model wrapped in fully sharded data parallelism, Megatron's or
    another, judged by its configuration or class name."""
    ddp_config = getattr(model, "ddp_config", None)
    name = type(model).__name__
    if getattr(ddp_config, "use_megatron_fsdp", False) or "FullyShardedDataParallel" in name:
        raise UsageError(
            f"{name} gathers parameters and frees gradients in its own order; "
            "use Megatron's DistributedDataParallel, with the distributed optimizer if memory asks"
        )


def _refuse_two_embeddings_on_a_rank(
    config: Any, models: Sequence[Any], step_policy: StepPolicy
) -> None:
    """Raise UsageError if a rank has the first and the last of several stages, and so two copies of
    an embedding (a tied one, or one for multi-token prediction), whose gradients Megatron would not
    add up."""
    shape = step_policy.shape
    is_on_one_rank = shape.rank_of(0) == shape.rank_of(shape.num_stages - 1)
    if shape.num_stages == 1 or not is_on_one_rank:
        return
    is_tied = any(attribute_of(model, "share_embeddings_and_output_weights") for model in models)
    if is_tied or getattr(config, "mtp_num_layers", None):
        raise UsageError(
            "the first and the last stage are on one rank, where the two copies of an embedding "
            f"that {'is tied' if is_tied else 'mtp_num_layers makes'} are added up by nobody; "
            f"{'untie it' if is_tied else 'switch it off'}, or take several ranks and placement "
            "loop"
        )
