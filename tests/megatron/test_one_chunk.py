"""The tasks of one chunk beside a device, and with layers that torch.compile has compiled."""

import random
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rrfp.runtime.planes.host_planes import SharedMemoryPlane
from rrfp.runtime.planes.outbox import Outbox, _Copying
from rrfp.runtime.planes.plane import Completion, Staged
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.train.settings import TrainSettings
from tests.doubles.simulated_device import SimulatedDevice
from tests.e2e.ranks import run_ranks
from tests.megatron.one_chunk import SMALL

pytestmark = pytest.mark.timeout(300)


NUM_MESSAGES = 12
NUM_BYTES = 4096


class Forgetful(Outbox):
    """Releases the tensors when their copy is queued."""

    def _copy(self, *taken: Any) -> _Copying:
        copying = super()._copy(*taken)
        copying.waiting.tensors = ()
        return copying


class Slots:
    """The queue of a link that looks into each slot as soon as its message is staged."""

    def __init__(self, plane: SharedMemoryPlane) -> None:
        self._plane = plane
        self.found: dict[int, bytes] = {}

    def put(self, completion: Completion) -> None:
        assert isinstance(completion, Staged), completion
        offset = completion.descriptor.offset
        slot = self._plane.slab[offset : offset + NUM_BYTES]
        self.found[completion.ticket.task.microbatch] = slot.numpy().tobytes()


@dataclass(frozen=True)
class Ticket:
    """A message's name."""

    task: Task


class Late(torch.nn.Module):
    """A first stage whose output comes into being late, on the compute stream."""

    model_type = None

    def __init__(self, config: Any, device: SimulatedDevice) -> None:
        super().__init__()
        self.config = config
        self._device = device

    def set_input_tensor(self, tensors: Any) -> None:
        pass

    def forward(self, microbatch: int) -> torch.Tensor:
        device = self._device
        stream = device.compute_stream()
        output = device.empty((NUM_BYTES,), torch.uint8, stream)
        source = torch.frombuffer(bytearray(content(microbatch)), dtype=torch.uint8)
        device.copy(output, source, stream)
        device.launch(lambda: source.numel(), stream)  # type: ignore[arg-type] # kept until then
        return output


def content(microbatch: int) -> bytes:
    return random.Random(microbatch).randbytes(NUM_BYTES)


def send_deallocated(outbox_type: type[Outbox]) -> int:
    """Run a chunk's forwards, each of which frees its output, and send what they return. Counts
    the messages that lie in their slots as something else."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core.model_parallel_config import ModelParallelConfig

    from rrfp.megatron.settings import GradOrder
    from rrfp.megatron.step.stage import ChunkStep, StepArguments

    device = SimulatedDevice(1, mean_delay_s=1e-3, compute_delay_s=0.0)
    config = ModelParallelConfig(deallocate_pipeline_outputs=True, pipeline_dtype=torch.float32)
    model = Late(config, device)
    nothing: Any = None
    arguments = StepArguments(
        lambda data, model: (model(next(data)), None),
        data=nothing,
        order=range(NUM_MESSAGES),
        num_microbatches=NUM_MESSAGES,
        forward_only=False,
        collect_non_loss_data=False,
        first_val_step=None,
    )
    shape = Shape(2, NUM_MESSAGES)
    chunk = ChunkStep(model, config, arguments, 0, shape, 0, GradOrder.CANONICAL, cp_size=1)
    plane = SharedMemoryPlane(device, 2 * NUM_MESSAGES * NUM_BYTES)
    link, outbox = Slots(plane), outbox_type(plane.name, device, plane.slab)
    outbox.open()
    for microbatch in range(NUM_MESSAGES):
        sent, _ = chunk.forward(microbatch, (), iter([microbatch]))
        assert chunk._activations[microbatch][1][0].numel() == 1
        outbox.stage(sent, Ticket(Task(1, Kind.F, microbatch)), link)
        del sent
        time.sleep(1e-3)
    outbox.drain(20.0)
    outbox.close(20.0)
    device.close()
    assert len(link.found) == NUM_MESSAGES
    return sum(link.found[each] != content(each) for each in range(NUM_MESSAGES))


def test_an_outbox_keeps_what_the_chunk_has_freed() -> None:
    assert run_ranks(1, send_deallocated, Outbox) == [0]
    (num_corrupt,) = run_ranks(1, send_deallocated, Forgetful)
    assert num_corrupt > 0


class WaitsForDevice(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own
    """Counts the operations that on a GPU make the host wait for the result."""

    WAITING = (
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::masked_select",
        "aten::equal",
        "aten::_unique2",
        "aten::unique_dim",
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's own
        self.counted: Counter[str] = Counter()
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        name = func._schema.name
        has_size = len(args) > 2 or (kwargs or {}).get("output_size") is not None
        # Random states, as bytes, are the host's on every device.
        is_state = name == "aten::equal" and args[0].dtype == torch.uint8
        waits = name in self.WAITING or (name == "aten::repeat_interleave" and not has_size)
        if waits and not is_state:
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


def count_waits(flags: dict[str, Any]) -> dict[str, int]:
    """The waits in tasks and at the end of two steps under rrfp."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.megatron.step.stage import RankStep
    from rrfp.runtime.pace import Delays
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.verify.rank import _train

    settings = TrainSettings(**{**SMALL, **flags}, chunks=2, placement="v", microbatches=4, steps=2)
    waits = WaitsForDevice()

    def watched(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with waits:
                return method(*args, **kwargs)

        return call

    with (
        patch.object(RankStep, "__init__", watched(RankStep.__init__)),
        patch.object(RankStep, "run", watched(RankStep.run)),
        patch.object(RankStep, "finish", watched(RankStep.finish)),
        parallel_groups(settings) as layout,
    ):
        _train(settings, layout, Delays(0, layout.rank, 0.0))
    assert waits.num_operations > 1000
    return dict(waits.counted)


@pytest.mark.parametrize(
    "flags",
    [
        {"hint": "zb-v", "dropout": 0.1, "dtype": "bf16"},
        {"hint": "f-first", "dropout": 0.1, "recompute": "full"},
        {"hint": "bfw", "model": "vlm"},
    ],
    ids=lambda flags: flags["hint"],
)
def test_no_task_waits_for_the_device(flags: dict[str, Any]) -> None:
    assert run_ranks(1, count_waits, flags) == [{}]


# Layers that torch.compile has compiled learn the same out of order, bit for bit.


IN_ORDER = {"hint": "zb-v", "dispatch": "fixed"}


def learn(hints: list[dict[str, Any]], compiled: str) -> list[dict[str, Any]]:
    """The results of one rank with two chunks, with compiled layers or compiled MLPs."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from torch._dynamo.utils import counters

    from rrfp.runtime.pace import Delays
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.verify import rank

    module: Any = rank  # it declares no such name
    build = module.build_model

    def build_compiled(*arguments: Any) -> Any:
        model = build(*arguments)
        for chunk in model.chunks:
            for layer in chunk.module.decoder.layers:
                # It traces and splits graphs as ever, and needs no compiler of C++.
                (layer.get_submodule(compiled) if compiled else layer).compile(backend="aot_eager")
        return model

    base = TrainSettings(**SMALL, chunks=2, placement="v", microbatches=4, steps=2, dropout=0.1)
    found: list[dict[str, Any]] = []
    with parallel_groups(base) as layout:
        for hint in hints:
            torch.compiler.reset()
            module.build_model = build_compiled if found else build
            num_compiled = counters["stats"]["unique_graphs"]
            learned = rank._train(base.changed(**hint), layout, Delays(0, layout.rank, 0.0))
            found.append(asdict(learned))
            assert (counters["stats"]["unique_graphs"] > num_compiled) is (len(found) > 1)
    return found


@pytest.mark.parametrize("compiled", ["mlp", pytest.param("", marks=pytest.mark.slow)])
def test_compiled_layers_learn_the_same(compiled: str) -> None:
    hints = [IN_ORDER, {"hint": "zb-v"}, {"hint": "f-first"}]
    ((reference, *others),) = run_ranks(1, learn, hints, compiled, timeout_s=250)
    assert others == [reference] * 2
