"""The machine: CPU, GPU, precision, several processes under torchrun, memory and energy."""

import ctypes
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from vitrail.errors import FailureError, VitrailError

# Dense half-precision matrix arithmetic, FLOP/s, from the makers' data sheets.
PEAKS = {
    **{"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12},
    **{"B200": 2250e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12},
    **{"RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12, "T4": 65e12, "A6000": 155e12},
}
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Devices:
    """This process's device, and its place among all processes."""

    device: torch.device
    precision: torch.dtype
    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def autocast(self) -> AbstractContextManager[Any]:
        """Arithmetic in the run's precision."""
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
        """Whether any process says so; all processes get the same answer."""
        return self.largest(float(flag)) > 0

    def largest(self, value: float) -> float:
        """The largest value of all processes."""
        if self.world == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return box.item()

    def union(self, found: dict[str, str]) -> dict[str, str]:
        """What any process found."""
        if self.world == 1:
            return found
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, found)
        return {name: reason for part in parts for name, reason in part.items()}

    def shared(self, value: Any) -> Any:
        """The main process's value, in every process."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def wait(self) -> None:
        """Until all processes are here."""
        if self.world > 1:
            dist.barrier()

    def synchronize(self) -> None:
        """Until the device has done what it was given, so that a clock can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def hardware(self) -> str:
        """The machine in words."""
        count = f"{self.world} × " if self.world > 1 else ""
        if self.device.type == "cuda":
            return f"{count or '1 × '}{torch.cuda.get_device_name(self.device)}"
        return f"{count}{processor()}, {cores()} cores" + (
            ", Apple GPU" if self.device.type == "mps" else ""
        )

    def peak(self) -> float | None:
        """FLOP/s that all devices could do at best in half precision, where that is known."""
        if self.device.type != "cuda" or self.precision is torch.float32:
            return None
        name = torch.cuda.get_device_name(self.device)
        found = next((peak for known, peak in PEAKS.items() if known in name), None)
        return None if found is None else found * self.world


def cores() -> int:
    """Processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextmanager
def devices(
    wish: str = "auto",
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    deterministic: bool = False,
) -> Iterator[Devices]:
    """This process's part of the machine; under torchrun, joined with the other processes."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = choose(wish)
    started = False
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        started = True
    try:
        # Numbers next to zero, which an optimizer's averages become, slow a processor a lot.
        torch.set_flush_denormal(device.type == "cpu")
        with determinism(deterministic), safe_attention():
            yield Devices(device, choose_precision(device, precision), rank, world)
    finally:
        torch.set_flush_denormal(False)
        if started:
            dist.destroy_process_group()


def choose(wish: str) -> torch.device:
    """The device that is asked for, or the best there is."""
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
        if wish == "cpu" and torch.backends.mps.is_available():
            wish = "mps"
    try:
        device = torch.device(wish)
    except RuntimeError:
        raise VitrailError(f"--device {wish}: expected auto, cpu, cuda, cuda:1 or mps") from None
    local = int(os.environ.get("LOCAL_RANK", 0))
    if device.type == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        number = device.index if device.index is not None else local
        if number >= there:
            raise VitrailError(f"--device {wish}: this machine has {there} GPUs; use --device cpu")
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise VitrailError("--device mps: there is no Apple GPU here; use --device cpu")
    return device


def choose_precision(device: torch.device, wish: str) -> torch.dtype:
    """The arithmetic that is asked for; auto is bfloat16 where a GPU has it."""
    if wish == "auto":
        capable = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if capable else torch.float32
    return getattr(torch, wish)


@contextmanager
def safe_attention() -> Iterator[None]:
    """Without cuDNN's attention, the default on Hopper GPUs since torch 2.11.

    Its backward pass can give NaN at lengths such as 64 (pytorch/pytorch#196678); a 32-pixel image
    in 4-pixel patches has just that many. The flash kernel takes its place, no slower.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Deterministic kernels only, for as long as the block runs."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def spread(task: nn.Module, parallel: Literal["ddp", "fsdp"], where: Devices) -> nn.Module:
    """The task on its device, as copies that agree (DDP) or in parts (FSDP2)."""
    if where.world == 1:
        return task.to(where.device)
    if parallel == "ddp":
        task.to(where.device)
        # A class token's gradient is a slice of that of all tokens; copying it costs nothing.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
        ids = [where.device.index] if where.device.type == "cuda" else None
        return DistributedDataParallel(task, device_ids=ids, gradient_as_bucket_view=True)
    mesh = dist.init_device_mesh(where.device.type, (where.world,))
    # Block by block onto the devices: the whole model may be larger than any of them.
    for block in blocks_of(task):
        fully_shard(block, mesh=mesh)
    # The model is the outermost part, so that it can be evaluated without its objective, unless
    # the objective has parameters of its own, such as a mask token.
    own = any(not name.startswith("model.") for name, _ in task.named_parameters())
    fully_shard(task if own else task.get_submodule("model"), mesh=mesh)
    return task.to(where.device)


def reshard(model: nn.Module) -> None:
    """Lets go of what a pass without gradients gathered; its weights are parts again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def blocks_of(task: nn.Module) -> list[nn.Module]:
    """The parts that are gathered one at a time: transformer blocks, or stages of a ResNet."""
    found: list[nn.Module] = []
    for name, module in task.named_modules():
        if name.rpartition(".")[2] in ("blocks", "stages"):
            found += module.children()
    return found


@contextmanager
def syncing(task: nn.Module, last: bool) -> Iterator[None]:
    """Gradients travel between processes only with the last part of a batch."""
    if isinstance(task, DistributedDataParallel) and not last:
        with task.no_sync():
            yield
        return
    for module in (task, *task.children()):
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
    yield


def rank_and_world() -> tuple[int, int]:
    """This process's number, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def too_large(where: Devices) -> FailureError:
    """What to do where working on fewer images at a time does not help."""
    return FailureError(
        f"out of memory on {where.hardware()}; use a smaller model or data.size, "
        "system.recompute=true, or several devices with system.parallel=fsdp"
    )


def reset_peak(device: torch.device) -> None:
    """Forget earlier peaks, where the system can; elsewhere the peak is that of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError, AttributeError):
        # What is free but was not given back to the system would hide the next rise.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory(device: torch.device) -> int:
    """Bytes: those that tensors had on a GPU at most; elsewhere the process's largest size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        # Unlike getrusage's, this figure can be reset.
        text = _STATUS.read_text(encoding="utf-8", errors="replace")
        line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), "")
        if line:
            return 1024 * int(line.split()[1])
    return largest_size()


def largest_size() -> int:
    """The process's largest size ever, in bytes; zero where the system has no such figure."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def energy(device: torch.device) -> float | None:
    """Joules that a GPU has taken since its driver was loaded; None where the driver has no count.

    It is asked directly, through the library that comes with it, so nothing needs installing.
    """
    library = driver() if device.type == "cuda" else None
    if library is None:
        return None
    return counted(library, str(torch.cuda.get_device_properties(device).uuid))


def counted(library: Any, uuid: str) -> float | None:
    """Joules of the GPU with that number; every answer but zero is a refusal."""
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    name = f"GPU-{uuid.removeprefix('GPU-')}"
    if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
        return None
    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
        return None
    return millijoules.value / 1000


@cache
def driver() -> ctypes.CDLL | None:
    """NVIDIA's management library, ready to be asked."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library
