"""Chooses the hint of a real run while it runs, on all ranks alike.

The run begins with a hint that is good in most cases. After its first steps, and then again and
again, the first rank has a process of its own simulate what they measured under all candidates.
From then on every step begins with a word from it: not yet, or which candidate steers from this
step on. So no step waits, and no rank runs a step under another policy than its neighbours.

Only the first replica is measured. The others are told as its own ranks are, since the order in
which gradients are reduced must be the same in all.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rrfp.errors import RrfpError
from rrfp.planning.candidates import Candidate
from rrfp.planning.collectives import told_by_first
from rrfp.planning.forecast import MeasuredTasks, Numbers
from rrfp.planning.hint_process import NUM_STEPS, ChoiceRequest, Choices
from rrfp.planning.order_planner import Gathering
from rrfp.planning.process_pool import PlannerProcess
from rrfp.planning.step_policy import ChoiceFigures, StepPolicy, step_policy
from rrfp.runtime.exit_hooks import at_end
from rrfp.schedule.knobs import counts_microbatches
from rrfp.schedule.named_hints import HINTS, AutoHint
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.trace.records import NS_PER_S, Record

_log = logging.getLogger(__name__)

_NICENESS = 10
_WARM_UP = 1
"""First steps that are not measured."""
_NUM_FIRST = 3
"""Steps that the first choice is made by."""
_WAIT_S = 300.0
"""For an answer, if a step waits for it."""
_W_SHARE = 0.5
"""The part of a backward that is W, where it was never split."""
_MOST_BYTES = 800_000
"""Of the measured steps that are sent."""
_NOT_YET, _NO_CHANGE, _FIRST_INDEX = range(3)
"""What a word begins with; from the last on, the index of a candidate."""


class HintChooser:
    """Chooses the policies of one layout's steps on this rank. All ranks of all replicas call
    `steering` together."""

    def __init__(self, asked: Policy) -> None:
        """`asked` has the hint `auto`."""
        assert isinstance(asked.hint, AutoHint)
        self._asked = asked
        self._auto = asked.hint
        self._measured: MeasuredTasks | None = None
        self._choices: Choices | None = None
        self._candidates: list[Candidate] = []
        self._current = 0
        self._steering: StepPolicy | None = None
        self._num_steps = 0
        """Since the steps have this shape."""
        self._gathering: Gathering | None = None
        self._known: deque[Numbers] = deque(maxlen=NUM_STEPS)
        self._budgets: tuple[int, ...] = ()
        self._w_shares: Numbers | None = None
        """The part of a backward, by stage, that is W, as it last was where it was split."""
        self._is_asking = False
        self._process: PlannerProcess | None = None
        at_end.register(self.close)

    def watched(self, record: Callable[[Record], None]) -> Callable[[Record], None]:
        """What a schedule's records go to from now on, on their way to `record`."""
        if self._measured is not None:
            return record
        self._measured = MeasuredTasks(record)
        return self._measured.record

    def steering(
        self,
        step: int,
        shape: Shape,
        config: Any,
        groups: Any,
        replicas: Any,
        device: torch.device,
        has_experts: bool,
    ) -> StepPolicy:
        """The policy of a training step of this shape. Raises as `told_by_first` does."""
        num_members = groups.tp.size() * groups.cp.size()
        # In a group, an order that binds leaves nothing to agree on, and the links are opened for
        # agreement. In bytes, nobody knows before a step what it keeps under an order that binds.
        choices = self._choices_for(shape, config, may_bind=num_members == 1 and not has_experts)
        if choices != self._choices:
            self._begin(choices)
        number, self._num_steps = self._num_steps, self._num_steps + 1
        self._take_in()
        leads_all = replicas.rank() == 0 and all(
            group.rank() == 0 for group in (groups.tp, groups.cp, groups.pp)
        )
        assert self._steering is not None
        last_shape = self._steering.shape
        figures = self._hear(groups, replicas, device) if self._is_asking else None
        due = self._due(number)
        if 0 < due <= self._num_measured(number + due) and not self._is_asking:
            self._gather(last_shape, groups, replicas, device)
        if due == 0 and not self._is_asking:
            self._is_asking = True
            if leads_all:
                self._ask(step, num_members)
        return replace(self._steering, choice=figures)

    def close(self) -> None:
        """End the process, if there is one. Also done at exit."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _choices_for(self, shape: Shape, config: Any, *, may_bind: bool) -> Choices:
        asked, splits = self._asked, None
        if getattr(config, "delay_wgrad_compute", False):
            splits = True
        elif getattr(config, "defer_embedding_wgrad_compute", False):
            splits = False
            asked = replace(asked, hint=HINTS["bf"])
        return Choices(asked, shape, splits, may_bind and counts_microbatches(asked.hold))

    def _begin(self, choices: Choices) -> None:
        """Begin anew, for steps of another shape."""
        self.close()
        self._choices, self._candidates = choices, choices.all()
        self._num_steps, self._is_asking, self._gathering = 0, False, None
        self._known.clear()
        self._w_shares = None
        self._change_to(0)

    def _change_to(self, index: int) -> None:
        chosen = self._candidates[index]
        self._current = index
        self._steering = step_policy(chosen.policy, chosen.shape, forward_only=False)

    def _due(self, number: int) -> int:
        """In how many steps the next question is asked."""
        # The last step that counts is over as the next one begins, and gathered one later.
        first = _WARM_UP + _NUM_FIRST + 1
        return first - number if number <= first else -(number - first) % self._auto.every

    def _num_measured(self, asked_at: int) -> int:
        """How many steps before a question are measured for it."""
        most = _NUM_FIRST if asked_at == _WARM_UP + _NUM_FIRST + 1 else NUM_STEPS
        return min(most, max(1, self._auto.every - 2))

    def _gather(self, shape: Shape, groups: Any, replicas: Any, device: torch.device) -> None:
        """Send what the last step, of this shape, took to the first rank."""
        if replicas.rank() > 0 or groups.tp.rank() > 0 or groups.cp.rank() > 0:
            return
        assert self._measured is not None
        # What its microbatches look like does not matter here.
        no_features = np.zeros((shape.num_microbatches, 0)) if groups.pp.rank() == 0 else None
        self._gathering = Gathering.begin(self._measured, shape, no_features, groups, device)

    def _take_in(self) -> None:
        """What was gathered while the last step ran."""
        gathering, self._gathering = self._gathering, None
        learned = None if gathering is None else gathering.result()
        if learned is None:
            return
        table = learned.measured
        backward = table[1] + table[2]
        if table[2].any():
            self._w_shares = table[2].sum(axis=1) / np.maximum(backward.sum(axis=1), 1.0)
        else:
            shares = self._w_shares
            table[2] = table[1] * (_W_SHARE if shares is None else shares[:, None])
            table[1] -= table[2]
            table[4] = table[3]
        self._known.append(table.astype(np.float32))
        self._budgets = learned.budgets

    def _ask(self, step: int, num_members: int) -> None:
        """Have a process find the answer; on the first rank of all."""
        if not self._known:
            return
        assert self._choices is not None
        # A request has to fit into a pipe, as nobody waits for its reader.
        num = max(1, min(len(self._known), _MOST_BYTES // self._known[0].nbytes))
        measured = tuple(self._known)[-num:]
        request = ChoiceRequest(
            self._choices, self._current, measured, self._budgets, num_members, step
        )
        self.close()
        try:
            self._process = PlannerProcess("rrfp.planning.hint_process", _NICENESS)
            if not self._process.send(request):
                raise RrfpError("the process that chooses takes no request")
        except RrfpError as error:
            self._give_up(str(error))

    def _hear(self, groups: Any, replicas: Any, device: torch.device) -> ChoiceFigures | None:
        """Take over what the first rank says as a step begins."""

        def decide() -> torch.Tensor:
            word = self._word() if replicas.rank() == 0 else torch.zeros(4, dtype=torch.float64)
            if replicas.size() > 1:
                word = word.to(device)
                dist.broadcast(word, dist.get_global_rank(replicas, 0), group=replicas)
            return word

        like = torch.empty(4, dtype=torch.float64)
        told = told_by_first(decide, like, groups, device, "choose a hint")
        code, predicted_s, kept_s, num_candidates = told.tolist()
        if code == _NOT_YET:
            return None
        self._is_asking = False
        if code == _NO_CHANGE:
            return None
        index = int(code) - _FIRST_INDEX
        if index != self._current:
            self._change_to(index)
        return ChoiceFigures(int(num_candidates), predicted_s, kept_s)

    def _word(self) -> torch.Tensor:
        """What the first rank says; it never fails, as the others would wait for it."""
        code, figures = _NO_CHANGE, [0.0, 0.0, 0.0]
        try:
            told = None if self._process is None else self._answer(self._process)
        except RrfpError as error:
            self._give_up(str(error))
            told = None
        if self._process is not None and told is None:
            code = _NOT_YET
        elif told is not None and "error" in told:
            self._give_up(told["error"])
        elif told is not None:
            self.close()
            code = _FIRST_INDEX + told["index"]
            figures = [
                told["predicted_ns"] / NS_PER_S,
                told["kept_ns"] / NS_PER_S,
                told["candidates"],
            ]
        return torch.tensor([code, *figures], dtype=torch.float64)

    def _answer(self, process: PlannerProcess) -> dict[str, Any] | None:
        """None if it has not come yet. Raises RrfpError if it never will."""
        told = process.wait(_WAIT_S) if self._auto.waits else process.answers()
        if not told and process.has_ended:
            raise RrfpError("the process that chooses has ended; what it printed above says why")
        return told[0] if told else None

    def _give_up(self, why: str) -> None:
        self.close()
        _log.warning("--hint auto: %s; the hint stays as it is", why)
