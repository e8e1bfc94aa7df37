"""Chooses the hint of a real run while it runs, the same on all ranks.

The run begins with a hint that is good in most cases. After its first steps, and then at regular
intervals, a process of the first rank simulates the measured steps under all candidates. From then
on every step begins with a broadcast from the first rank: not yet, or the candidate that is in
effect from this step on. So no step waits, and all ranks run a step under the same policy.

Only the first replica is measured, but all replicas take over its choice: gradients must be reduced
in the same order in all of them.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rrfp.errors import RrfpError
from rrfp.planning.candidates import Candidate
from rrfp.planning.collectives import (
    TableGather,
    broadcast_decision,
    broadcast_over_replicas,
    is_first_rank,
)
from rrfp.planning.forecast import MeasuredTasks, Numbers
from rrfp.planning.planner_process import PlannerProcess
from rrfp.planning.process_tasks import NUM_STEPS, ChoiceRequest, ChoiceRules
from rrfp.runtime.exit_hooks import at_end
from rrfp.schedule.named_hints import HINTS, AutoHint
from rrfp.schedule.policy import Policy, counts_microbatches
from rrfp.schedule.rehearsal import ChoiceFigures, StepPolicy, step_policy
from rrfp.schedule.shape import Shape
from rrfp.trace.records import NS_PER_S, Record

_log = logging.getLogger(__name__)

_NICENESS = 10
_WARM_UP = 1
"""First steps that are not measured."""
_NUM_FIRST = 3
"""Steps that the first choice is made by."""
_WAIT_S = 300.0
"""How long a step waits for an answer, if it waits."""
_W_SHARE = 0.5
"""The share of a backward that is W, where it was never split."""
_MOST_BYTES = 800_000
"""The most bytes of measured steps in a request."""
_NOT_YET, _NO_CHANGE, _FIRST_INDEX = range(3)
"""The first number of a decision; from the last on, it is the index of a candidate."""


class HintChooser:
    """Chooses the policies of one layout's steps on this rank. All ranks of all replicas call
    `policy` together."""

    def __init__(self, asked: Policy) -> None:
        """`asked` has the hint `auto`."""
        assert isinstance(asked.hint, AutoHint)
        self._asked = asked
        self._auto = asked.hint
        self._measured: MeasuredTasks | None = None
        self._rules: ChoiceRules | None = None
        self._candidates: list[Candidate] = []
        self._current = 0
        self._policy: StepPolicy | None = None
        self._num_steps = 0
        """Steps of the present shape."""
        self._gather: TableGather | None = None
        self._known: deque[Numbers] = deque(maxlen=NUM_STEPS)
        self._budgets: tuple[int, ...] = ()
        self._w_shares: Numbers | None = None
        """The share of a backward that is W, by stage, in the last steps that split it."""
        self._is_asking = False
        self._process: PlannerProcess | None = None
        at_end.register(self.close)

    def measured_record(self, record: Callable[[Record], None]) -> Callable[[Record], None]:
        """Return a function that takes a schedule's records, measures them and passes them on to
        `record`. After the first call it returns `record` itself."""
        if self._measured is not None:
            return record
        self._measured = MeasuredTasks(record)
        return self._measured.record

    def policy(
        self,
        step: int,
        shape: Shape,
        splits: bool | None,
        groups: Any,
        replicas: Any,
        device: torch.device,
        has_experts: bool,
    ) -> StepPolicy:
        """Return the policy of a training step of this shape, which all ranks take from the first
        rank of all. It does not wait for a choice, unless the hint says so.

        It also gathers the measured steps and, at regular intervals, starts the process that
        chooses. Another shape begins again with the starting candidate. `splits` says whether
        Megatron's configuration splits the backward (None: either works). Raises as
        `broadcast_decision` does.
        """
        num_members = groups.tp.size() * groups.cp.size()
        # In a group, a binding order leaves nothing to agree on, and the links are opened for
        # agreement. With a hold in bytes, the peak of a binding order is not known before a step.
        may_bind = num_members == 1 and not has_experts and counts_microbatches(self._asked.hold)
        asked = replace(self._asked, hint=HINTS["bf"]) if splits is False else self._asked
        rules = ChoiceRules(asked, shape, splits, may_bind)
        if rules != self._rules:
            self._begin(rules)
        number, self._num_steps = self._num_steps, self._num_steps + 1
        self._collect()
        assert self._policy is not None
        last_shape = self._policy.shape
        figures = self._receive(groups, replicas, device) if self._is_asking else None
        due = self._due(number)
        if 0 < due <= self._num_measured(number + due) and not self._is_asking:
            self._start_gather(last_shape, groups, replicas, device)
        if due == 0 and not self._is_asking:
            self._is_asking = True
            if replicas.rank() == 0 and is_first_rank(groups):
                self._request(step, num_members)
        return replace(self._policy, choice=figures)

    def close(self) -> None:
        """End the process that chooses, if there is one. Also called at exit."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _begin(self, rules: ChoiceRules) -> None:
        """Start over for steps of another shape: end the process, drop the measured steps, and put
        the starting candidate into effect."""
        self.close()
        self._rules, self._candidates = rules, rules.all()
        self._num_steps, self._is_asking, self._gather = 0, False, None
        self._known.clear()
        self._w_shares = None
        self._change_to(0)

    def _change_to(self, index: int) -> None:
        """Put a candidate into effect."""
        chosen = self._candidates[index]
        self._current = index
        self._policy = step_policy(chosen.policy, chosen.shape, forward_only=False)

    def _due(self, number: int) -> int:
        """Return the number of steps until the next request; 0 for a step that makes one. The first
        is made by step 5 of a shape, counted from 0, the others at the hint's interval."""
        # The last step that counts is over as the next one begins, and gathered one later.
        first = _WARM_UP + _NUM_FIRST + 1
        return first - number if number <= first else -(number - first) % self._auto.every

    def _num_measured(self, requested_at: int) -> int:
        """Return the number of steps right before a request that are measured for it: 3 for the
        first, 8 for others, fewer if the hint's interval is short."""
        most = _NUM_FIRST if requested_at == _WARM_UP + _NUM_FIRST + 1 else NUM_STEPS
        return min(most, max(1, self._auto.every - 2))

    def _start_gather(self, shape: Shape, groups: Any, replicas: Any, device: torch.device) -> None:
        """Start to gather the table of the last step, of this shape, on the pipeline's first rank.
        Only ranks of the first replica, with tensor- and context-parallel rank 0, take part; others
        do nothing."""
        if replicas.rank() > 0 or groups.tp.rank() > 0 or groups.cp.rank() > 0:
            return
        assert self._measured is not None
        self._gather = TableGather(self._measured.table(shape), shape, groups, device)

    def _collect(self) -> None:
        """Wait for the gather that began with the last step, and remember the step that it
        measured, on the first rank. Backwards that were not split are divided into B and W by the
        last known shares. Does nothing without a gather or if a rank has not measured the step."""
        gather, self._gather = self._gather, None
        result = None if gather is None else gather.result()
        if result is None:
            return
        table, self._budgets = result
        backward = table[1] + table[2]
        if table[2].any():
            self._w_shares = table[2].sum(axis=1) / np.maximum(backward.sum(axis=1), 1.0)
        else:
            shares = self._w_shares
            table[2] = table[1] * (_W_SHARE if shares is None else shares[:, None])
            table[1] -= table[2]
            table[4] = table[3]
        self._known.append(table.astype(np.float32))

    def _request(self, step: int, num_members: int) -> None:
        """Start a process that chooses, after ending an earlier one, and send it the last measured
        steps, at most 800 kB (but at least one step). Called on the first rank of all. Without
        measured steps it does nothing; if it fails, it warns."""
        if not self._known:
            return
        assert self._rules is not None
        # A request has to fit into a pipe, as sending must not wait.
        num = max(1, min(len(self._known), _MOST_BYTES // self._known[0].nbytes))
        measured = tuple(self._known)[-num:]
        request = ChoiceRequest(
            self._rules, self._current, measured, self._budgets, num_members, step
        )
        self.close()
        try:
            self._process = PlannerProcess("choose_hints", _NICENESS)
            if not self._process.send(request):
                raise RrfpError("the process that chooses takes no request")
        except RrfpError as error:
            self._give_up(str(error))

    def _receive(self, groups: Any, replicas: Any, device: torch.device) -> ChoiceFigures | None:
        """Take part in the broadcast of the decision of the first rank of all, and put the
        candidate that it names into effect. Returns its figures; None if there is no choice yet, or
        if choosing failed."""
        like = torch.empty(4, dtype=torch.float64)
        task = "choose a hint"
        code, predicted_s, kept_s, num_candidates = broadcast_decision(
            lambda: broadcast_over_replicas(self._decide, like, replicas, device, task),
            like,
            groups,
            device,
            task,
        ).tolist()
        if code == _NOT_YET:
            return None
        self._is_asking = False
        if code == _NO_CHANGE:
            return None
        index = int(code) - _FIRST_INDEX
        if index != self._current:
            self._change_to(index)
        return ChoiceFigures(int(num_candidates), predicted_s, kept_s)

    def _decide(self) -> torch.Tensor:
        """Return the decision of the first rank of all: a code, then the predicted time, the time
        under the policy until now, and the number of candidates. The process is ended after its
        answer. A failure is a warning and no change."""
        code, figures = _NO_CHANGE, [0.0, 0.0, 0.0]
        try:
            answer = None if self._process is None else self._answer(self._process)
        except RrfpError as error:
            self._give_up(str(error))
            answer = None
        if self._process is not None and answer is None:
            code = _NOT_YET
        elif answer is not None and "error" in answer:
            self._give_up(answer["error"])
        elif answer is not None:
            self.close()
            code = _FIRST_INDEX + answer["index"]
            figures = [
                answer["predicted_ns"] / NS_PER_S,
                answer["kept_ns"] / NS_PER_S,
                answer["candidates"],
            ]
        return torch.tensor([code, *figures], dtype=torch.float64)

    def _answer(self, process: PlannerProcess) -> dict[str, Any] | None:
        """Return the process' answer; None if it has not come yet, which it waits for only if the
        hint says so. Raises RrfpError if the process has ended without one, or after a wait of
        300 s."""
        answers = process.wait(_WAIT_S) if self._auto.waits else process.answers()
        if not answers and process.has_ended:
            raise RrfpError("the process that chooses has ended; what it printed above says why")
        return answers[0] if answers else None

    def _give_up(self, why: str) -> None:
        """End the process and warn; the policy stays as it is."""
        self.close()
        _log.warning("--hint auto: %s; the hint stays as it is", why)
