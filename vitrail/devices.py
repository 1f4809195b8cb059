"""The machine: CPU, GPU, precision, several processes under torchrun, memory and energy."""

import ctypes
import gc
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitrail.console import say
from vitrail.errors import FailureError, VitrailError, one_line, out_of_memory

# Dense half-precision FLOP/s of matrix products, from the data sheets.
_PEAK_FLOPS = {
    **{"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12},
    **{"B200": 2250e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12},
    **{"RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12, "T4": 65e12, "A6000": 155e12},
}
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Devices:
    """This process's device, its precision and its rank among all processes."""

    device: torch.device
    precision: torch.dtype
    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return int(os.environ.get("LOCAL_RANK", 0)) if self.world > 1 else 0

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.precision)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes, for logs."""
        if self.world > 1:
            dist.all_reduce(value)
            value /= self.world
        return value

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return self.largest(float(flag)) > 0

    def largest(self, value: float) -> float:
        """The largest value of any process."""
        if self.world == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return box.item()

    def union(self, values: dict[str, str]) -> dict[str, str]:
        """The dictionaries of all processes merged."""
        if self.world == 1:
            return values
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, values)
        return {key: value for part in parts for key, value in part.items()}

    def broadcast(self, value: Any) -> Any:
        """The main process's value, in every process."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            dist.barrier()

    def synchronize(self) -> None:
        """Wait for the device to finish, so that a clock can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def hardware(self) -> str:
        """`2 × NVIDIA H200`, or the processor and its cores."""
        count = f"{self.world} × " if self.world > 1 else ""
        if self.device.type == "cuda":
            return f"{count or '1 × '}{torch.cuda.get_device_name(self.device)}"
        return f"{count}{processor()}, {cores()} cores" + (
            ", Apple GPU" if self.device.type == "mps" else ""
        )

    def peak(self) -> float | None:
        """Peak half-precision FLOP/s of all devices, if known."""
        if self.device.type != "cuda" or self.precision is torch.float32:
            return None
        name = torch.cuda.get_device_name(self.device)
        peak = next((peak for known, peak in _PEAK_FLOPS.items() if known in name), None)
        return None if peak is None else peak * self.world


class WaitClock:
    """How long a device waits inside `measure` blocks: for a GPU, the time between what was
    submitted before a block and what is submitted after it."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        began = self._mark()
        yield
        self._marks.append((began, self._mark()))

    def read(self) -> float:
        """Seconds since the last call; a GPU must have finished what was submitted."""
        marks, self._marks = self._marks, []
        if self.on_gpu:
            return sum(began.elapsed_time(end) for began, end in marks) / 1000
        return sum(end - began for began, end in marks)

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """At most so many threads of torch's own inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, count)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def decoding_processes(device: torch.device) -> int:
    """How many decode images: all cores beside a GPU, none where the cores compute as well."""
    if device.type != "cuda":
        return 0
    return max(1, cores() // min(rank_and_world()[1], torch.cuda.device_count()))


def available_memory() -> int:
    """Bytes of main memory that can be taken without swapping, within the limit of a container."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        line = next(line for line in text.splitlines() if line.startswith("MemAvailable:"))
        limits = [1024 * int(line.split()[1])]
    with suppress(OSError, ValueError):  # a container's, where it has one ("max" is none)
        folder = Path("/sys/fs/cgroup")
        used, most = ((folder / name).read_text() for name in ("memory.current", "memory.max"))
        limits.append(int(most) - int(used))
    return max(0, min(limits))


def total_memory() -> int:
    """Bytes of main memory, within the limit of a container."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def processor() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextmanager
def setup_devices(
    device: str = "auto",
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    deterministic: bool = False,
) -> Iterator[Devices]:
    """Set up this process's device; under torchrun, join the process group."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    chosen = choose_device(device)
    started = world > 1 and not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        # Denormal numbers, which an optimizer's averages become, are slow on a CPU.
        torch.set_flush_denormal(chosen.type == "cpu")
        with _determinism(deterministic), _without_cudnn_attention():
            yield Devices(chosen, _choose_precision(chosen, precision), rank, world)
    finally:
        torch.set_flush_denormal(False)
        if started:
            dist.destroy_process_group()


def choose_device(name: str) -> torch.device:
    """The named device; auto is the best there is."""
    if name == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else mps
    try:
        device = torch.device(name)
    except RuntimeError:
        raise VitrailError(f"--device {name}: expected auto, cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        index = local_rank if device.index is None else device.index
        if index >= gpus:
            raise VitrailError(f"--device {name}: this machine has {gpus} GPUs; use --device cpu")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise VitrailError("--device mps: this machine has no Apple GPU; use --device cpu")
    return device


def _choose_precision(device: torch.device, precision: str) -> torch.dtype:
    """The named precision; auto is bfloat16 on a GPU that supports it."""
    if precision == "auto":
        capable = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if capable else torch.float32
    return getattr(torch, precision)


@contextmanager
def _without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN's attention, the default on Hopper GPUs since torch 2.11.

    Its backward pass can give NaN at lengths such as 64 (pytorch/pytorch#196678), which a 32-pixel
    image in 4-pixel patches has. The flash kernel takes its place, no slower.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def _determinism(enabled: bool) -> Iterator[None]:
    """Use only deterministic kernels inside the block."""
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def graph_forward(model: nn.Module, batch: int) -> None:
    """Records the forward and backward pass of training as CUDA graphs, at the first batch of the
    given size: launching the kernels one by one takes longer than a small model computes."""
    plain: Any = model.forward
    graphed: Any = None

    def forward(*inputs: Tensor) -> Tensor:
        nonlocal graphed
        # Gradients are written to the same memory every time, so they cannot be accumulated.
        if not (model.training and torch.is_grad_enabled() and len(inputs[0]) == batch):
            return plain(*inputs)
        if graphed is None:
            try:
                graphed = _recorded(model, plain, inputs)
            except RuntimeError as error:
                # Recording takes more memory than the passes themselves; when it runs out, torch
                # may only say that the capture failed.
                if not (out_of_memory(error) or "capture" in str(error)):
                    raise
                say(f"graphs   not recorded: {one_line(error)}")
                graphed = plain
            model.forward = forward
        return graphed(*inputs)

    model.forward = forward


def drop_graphs(task: nn.Module) -> None:
    """Frees what `graph_forward` has recorded; forward passes are as before."""
    for module in task.modules():
        vars(module).pop("forward", None)
    gc.collect()


def _recorded(model: nn.Module, plain: Any, inputs: tuple[Tensor, ...]) -> Any:
    """The graphs, in the precision of the surrounding autocast."""
    model.forward = plain
    gc.collect()  # graphs of earlier runs, which must not be freed during the recording
    enabled, kind = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    state = torch.cuda.get_rng_state()
    # Weights cast to half precision belong to the graphs, not to autocast's cache.
    autocast = torch.autocast("cuda", kind, enabled, cache_enabled=False)
    with warnings.catch_warnings(), autocast:
        # torch warms up on another stream, of which it warns.
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no cur")
        samples = tuple(x.detach().clone() for x in inputs)
        torch.cuda.make_graphed_callables(model, samples, allow_unused_input=True)
    # What the passes before the recording have drawn does not count.
    torch.cuda.set_rng_state(state)
    return model.forward


def graph_inference(function: Callable[[Tensor], Tensor], most: int) -> Callable[[Tensor], Tensor]:
    """A function of a batch on a CUDA device that replays graphs for up to `most` images.

    There is a graph for 1, 2, 4, … images, each recorded when it is first needed; batches of other
    sizes are padded.
    """
    recorded: dict[tuple[int, ...], Callable[[Tensor], Tensor]] = {}
    lock = Lock()

    @torch.inference_mode()
    def call(images: Tensor) -> Tensor:
        count = len(images)
        if not 0 < count <= most:
            return function(images)
        padded = images.new_zeros(1 << (count - 1).bit_length(), *images.shape[1:])
        padded[:count] = images
        with lock:  # the graphs read and write memory of their own
            if padded.shape not in recorded:
                recorded[padded.shape] = _record_inference(function, padded)
            return recorded[padded.shape](padded)[:count].clone()

    return call


def _record_inference(
    function: Callable[[Tensor], Tensor], images: Tensor
) -> Callable[[Tensor], Tensor]:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # kernels are chosen and compiled
        for _ in range(2):
            function(images)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = function(images)

    def replay(batch: Tensor) -> Tensor:
        images.copy_(batch)
        graph.replay()
        return outputs

    return replay


def parallelize(task: nn.Module, parallel: Literal["ddp", "fsdp"], where: Devices) -> nn.Module:
    """The task on its device, replicated (DDP) or sharded (FSDP2)."""
    if where.world == 1:
        return task.to(where.device)
    if parallel == "ddp":
        task.to(where.device)
        # A class token's gradient is a slice of that of all tokens; copying it costs nothing.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
        ids = [where.device.index] if where.device.type == "cuda" else None
        return DistributedDataParallel(task, device_ids=ids, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(where.device.type, (where.world,))
    # Block by block onto the devices: the whole model may be larger than any of them.
    for block in _blocks(task):
        fully_shard(block, mesh=mesh)
    # The model is the outermost part, so that it can be evaluated without its objective, unless
    # the objective has parameters of its own, such as a mask token.
    own = any(not name.startswith("model.") for name, _ in task.named_parameters())
    fully_shard(task if own else task.get_submodule("model"), mesh=mesh)
    return task.to(where.device)


def reshard(model: nn.Module) -> None:
    """Free the weights that a pass without gradients gathered."""
    for module in _sharded(model.modules()):
        module.reshard()


def gather_outside_blocks(task: nn.Module) -> None:
    """Gather the weights outside the blocks for a pass that is not the task's own; `reshard` frees
    them."""
    for outermost in _sharded(task.modules())[:1]:
        outermost.unshard()


def _sharded(modules: Iterable[nn.Module]) -> list[Any]:
    """Those that FSDP2 shards; a single process has none, and does without the slow import."""
    if rank_and_world()[1] == 1:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in modules if isinstance(module, FSDPModule)]


def _blocks(task: nn.Module) -> list[nn.Module]:
    """The parts that are gathered one at a time: transformer blocks, or stages of a ResNet."""
    return [
        block
        for name, module in task.named_modules()
        if name.rpartition(".")[2] in ("blocks", "stages")
        for block in module.children()
    ]


@contextmanager
def sync_gradients(task: nn.Module, last: bool) -> Iterator[None]:
    """Synchronize gradients only with the last microbatch of a batch."""
    if isinstance(task, DistributedDataParallel) and not last:
        with task.no_sync():
            yield
        return
    for module in _sharded((task, *task.children())):
        module.set_requires_gradient_sync(last)
    yield


def release_memory() -> None:
    """Returns unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rank_and_world() -> tuple[int, int]:
    """This process's rank, and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def out_of_memory_error(where: Devices) -> FailureError:
    """The error if fewer images at a time do not help."""
    return FailureError(
        f"out of memory on {where.hardware()}; use a smaller model or data.size, "
        "system.recompute=true, system.graphs=false, or several devices with system.parallel=fsdp"
    )


def reset_peak(device: torch.device) -> None:
    """Reset the peak of `peak_memory`, if the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError, AttributeError):
        # Freed memory that was not returned to the system would hide the next rise.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory(device: torch.device) -> int:
    """Peak bytes of tensors on a GPU; elsewhere the peak resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        # Unlike that of getrusage, this figure can be reset.
        text = _STATUS.read_text(encoding="utf-8", errors="replace")
        line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), "")
        if line:
            return 1024 * int(line.split()[1])
    return peak_rss()


def peak_rss() -> int:
    """Peak resident size of the process in bytes; zero if the system has no such figure."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def energy(device: torch.device) -> float | None:
    """Joules that a GPU has used since its driver was loaded; None if the driver has no count.

    Read through NVML, which comes with the driver, so that nothing needs installing.
    """
    library = _nvml() if device.type == "cuda" else None
    if library is None:
        return None
    return read_energy(library, str(torch.cuda.get_device_properties(device).uuid))


def read_energy(library: Any, uuid: str) -> float | None:
    """Joules of the GPU with that UUID; any return code but zero is a refusal."""
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    name = f"GPU-{uuid.removeprefix('GPU-')}"
    if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
        return None
    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
        return None
    return millijoules.value / 1000


@cache
def _nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library
