"""Memory bought for the worst step, and used in all others: `python -m benchmarks.run_bytes`.

The budget is a percentile of the peaks, in bytes, that 1F1B has in 200 steps. The figures of
docs/memory.md.
"""

import numpy as np

from benchmarks.bytes_rows import COSTS, OTHER_SEEDS, V, row_of
from rrfp.schedule.admission import Admit
from rrfp.schedule.policy import Bytes, Dispatch
from rrfp.simulate.memory_budgets import peak_of_1f1b


def main() -> None:
    peaks = [peak_of_1f1b(COSTS, V, seed, 0) or 0 for seed in OTHER_SEEDS]
    median, most = np.percentile(peaks, [50, 99])
    fixed = row_of("zb-v", V, OTHER_SEEDS, dispatch=Dispatch.FIXED)
    print(f"1F1B's peaks: {median / 1e9:.1f} GB in the median step, {most / 1e9:.1f} in the 99th")
    print(f"ZBV, fixed: {fixed.ratio_to_load:.3f} over load")
    for admit in Admit:
        row = row_of("zb-v", V, OTHER_SEEDS, admit, Bytes(int(most)))
        faster = fixed.mean_s / row.mean_s
        print(f"zb-v at the 99th, {admit}: {row.ratio_to_load:.3f} over load, {faster:.2f}x")


if __name__ == "__main__":
    main()
