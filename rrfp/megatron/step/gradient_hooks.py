"""Finds the hooks of a weight's gradient, and intercepts gradients that autograd adds to a weight.

A split backward computes a weight's gradient outside of autograd, which then runs none of its
hooks. Megatron's DistributedDataParallel has a hook on every weight. The code that adds the
gradients does that hook's work, so it does not count.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as globally

from rrfp.megatron.provenance import described

_DISTRIBUTED = "megatron.core.distributed.distributed_data_parallel"

Path = tuple[torch.nn.Module, ...]
"""Modules from the outermost to the owner of a parameter."""


def paths_to_parameters(root: torch.nn.Module) -> dict[torch.nn.Parameter, list[Path]]:
    """For each parameter, the modules around it; one path for each module that owns it."""
    paths: dict[torch.nn.Module, Path] = {}
    found: dict[torch.nn.Parameter, list[Path]] = {}
    todo: list[Path] = [(root,)]
    while todo:
        path = todo.pop()
        owner = path[-1]
        if owner in paths:
            continue
        paths[owner] = path
        for parameter in owner.parameters(recurse=False):
            found.setdefault(parameter, []).append(path)
        todo += [(*path, child) for child in owner.children()]
    return found


def weight_hook(weight: torch.nn.Parameter) -> Any | None:
    """A hook on a weight that is not Megatron's own, if there is one."""
    return _hook_among(weight, *_hooks_of(torch.autograd.graph.get_gradient_edge(weight).node))


def _hook_among(weight: Any, before: dict[int, Any], after: dict[int, Any]) -> Any | None:
    for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks):
        if hooks:
            return next(iter(hooks.values()))
    for hook in before.values():
        if not isinstance(hook, _Interception):
            return hook
    for hook in after.values():
        if not _is_megatrons(hook):
            return hook
    return None


def _hooks_of(node: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks of a node that run before and after it. A handle is the only way to them."""
    found = []
    for register in (node.register_prehook, node.register_hook):
        probe = register(_nothing)
        found.append(probe.hooks_dict_ref())
        probe.remove()
    before, after = found
    return before, after


def module_hook(path: Path) -> Any | None:
    """A hook that runs in the backward of one of these modules and may look at gradients there."""
    for hooks in (globally._global_backward_hooks, globally._global_backward_pre_hooks):
        if hooks:
            return next(iter(hooks.values()))
    for module in path:
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            if hooks:
                return next(iter(hooks.values()))
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            return module  # Its hooks are out of Python's sight.
    return None


class Accumulator:
    """The node by which autograd adds gradients to a weight."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        paths: Iterable[Path],
        take: Callable[["Accumulator", torch.Tensor | None], bool],
    ) -> None:
        """`take` is a method that gets what autograd is about to add, and returns whether it has
        kept it. The node then adds nothing, and none of its later hooks run."""
        self.weight = weight
        self.node: Any = torch.autograd.graph.get_gradient_edge(weight).node
        self._paths = list(paths)
        self._take = weakref.WeakMethod(take)
        self._before, self._after = _hooks_of(self.node)
        weakref.finalize(self, self.node.register_prehook(_Interception(self)).remove)
        self._set_aside: dict[int, Any] = {}

    def hook(self) -> Any | None:
        """A hook on the weight that is not Megatron's own, if there is one."""
        return _hook_among(self.weight, self._before, self._after)

    def module_hook(self) -> Any | None:
        """A hook on a module around the weight that runs in its backward."""
        for path in self._paths:
            found = module_hook(path)
            if found is not None:
                return found
        return None

    def restore(self) -> None:
        """Put back the hooks that have been set aside."""
        self._after.update(self._set_aside)
        self._set_aside = {}

    def before_adding(self, gradients: tuple[torch.Tensor | None]) -> tuple[None] | None:
        (gradient,) = gradients
        take = self._take()
        if take is None or not take(self, gradient):
            return None
        self._set_aside.update(self._after)
        self._after.clear()
        return (None,)


class _Interception:
    """The hook of an accumulator on its node, which may outlive it and must not keep it alive."""

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = weakref.ref(accumulator)

    def __call__(self, gradients: tuple[torch.Tensor | None]) -> tuple[None] | None:
        accumulator = self._accumulator()
        return None if accumulator is None else accumulator.before_adding(gradients)


def outputs_of_backward(outermost: Iterable[Any]) -> Iterable[Any]:
    """The tensors that the innermost backward on this thread began with: those of a recomputed part
    of the model, or else `outermost`."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is torch.autograd.backward.__code__:
            tensors = frame.f_locals["tensors"]
            return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        frame = frame.f_back
    return outermost


def edges_to(node: Any, outputs: Iterable[torch.Tensor | None]) -> Iterator[tuple[Any, list[int]]]:
    """The nodes of the graph behind `outputs` that pass gradients to this node, and at which of
    their places."""
    todo = [output.grad_fn for output in outputs if output is not None]
    seen = set()
    while todo:
        before: Any = todo.pop()
        if before is None or before in seen:
            continue
        seen.add(before)
        following = [after for after, _ in before.next_functions]
        places = [place for place, after in enumerate(following) if after is node]
        if places:
            yield before, places
        todo += following


def described_hook(hook: Any) -> str:
    """A hook, for a sentence."""
    if isinstance(hook, torch.nn.Module):
        return f"hooks of {type(hook).__module__}.{type(hook).__qualname__}"
    return f"the hook {described(hook)}"


def _is_megatrons(hook: Any) -> bool:
    return bool(getattr(hook, "__module__", None) == _DISTRIBUTED)


def _nothing(*_: Any) -> None:
    pass
