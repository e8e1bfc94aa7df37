"""The metrics of every step, over all ranks: one line of `metrics.jsonl` each."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from rrfp.runtime.protocols import StepSummary
from rrfp.trace.records import NS_PER_S, RankInfo
from rrfp.trace.report_file import ReportFile
from rrfp.train.pacing import PaceTally
from rrfp.train.ranks.parallel import Layout
from rrfp.train.training import StepResult


class Metrics:
    """Gathers each step's numbers from all ranks; rank 0 writes and flushes them."""

    def __init__(
        self, path: Path, layout: Layout, info: RankInfo, *, is_traced: bool, is_needed: bool
    ) -> None:
        """`is_needed` where a run without its directory is of no use."""
        self._layout = layout
        self._offset_ns = info.clock_offset_ns
        self._is_traced = is_traced
        self._file = ReportFile(path, is_needed=is_needed) if layout.rank == 0 else None

    def write(
        self,
        step: int,
        result: StepResult,
        summary: StepSummary,
        seconds: float,
        tally: PaceTally | None,
        plan: dict[str, object] | None = None,
        hint: str | None = None,
        choice: dict[str, object] | None = None,
    ) -> None:
        """Write a finished step that took `seconds` in all; every rank calls this. `tally` is this
        rank's, if tasks have modelled times. `plan` says how its order of entry was chosen, `hint`
        what steered it, and `choice` how that was chosen, if it was in this step."""
        layout = self._layout
        own_tally = tally or PaceTally()
        # Float64 represents nanoseconds exactly for the first hundred days after a host's boot.
        own = torch.tensor(
            [
                summary.start_ns + self._offset_ns,
                summary.end_ns + self._offset_ns,
                summary.busy_ns,
                summary.peak_held,
                summary.peak_held_bytes or 0,
                own_tally.num_tasks,
                own_tally.num_over,
                own_tally.worst_over_ns,
                *_bytes_on_gpu(layout.device),
            ],
            dtype=torch.float64,
        )
        ranks = [torch.empty_like(own) for _ in range(layout.world_size)]
        dist.all_gather(ranks, own)
        if self._file is None:
            return
        table = torch.stack(ranks)
        window_ns = float(table[:, 1].max() - table[:, 0].min())
        # Pipeline rank varies slowest in the numbering of ranks.
        busy = (table[:, 2] / window_ns).reshape(layout.pp, -1)
        peak_held = table[:, 3].reshape(layout.pp, -1).amax(dim=1)
        peak_bytes = table[:, 4].reshape(layout.pp, -1).amax(dim=1)
        on_gpu = table[:, 8:].reshape(layout.pp, -1, 2).amax(dim=1)
        line = {
            "step": step,
            "loss": result.loss,
            "heldout_loss": result.heldout_loss,
            "grad_norm": result.grad_norm,
            "step_time_s": seconds,
            "tokens": result.tokens,
            "bubble_fraction": 1.0 - float(busy.mean()) if self._is_traced else None,
            "peak_held": peak_held.tolist(),
            "peak_held_bytes": [int(each) for each in peak_bytes] if peak_bytes.any() else None,
            "allocated_bytes": on_gpu[:, 0].long().tolist() if on_gpu.any() else None,
            "peak_allocated_bytes": on_gpu[:, 1].long().tolist() if on_gpu.any() else None,
            "busy_fraction": busy.mean(dim=1).tolist(),
            "plan": plan,
            "hint": hint,
            "choice": choice,
            "over_pace": None
            if tally is None
            else {
                "tasks": int(table[:, 6].sum()),
                "of": int(table[:, 5].sum()),
                "worst_s": float(table[:, 7].max()) / NS_PER_S,
            },
        }
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def copy_to(self, path: Path) -> None:
        """Write all lines so far into another file, on rank 0. May raise OSError."""
        if self._file is not None:
            self._file.copy_to(path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _bytes_on_gpu(device: torch.device) -> tuple[int, int]:
    """What this rank's tensors take now, and the most they took since the last call; 0 on a CPU."""
    if device.type == "cpu":
        return 0, 0
    told = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return told
