"""`cost="measured"`: seconds of each distinct op, measured alone on the machine where the plan will run.

Ops with the same signature (op, shapes, strides, dtypes, other arguments) are measured once on each machine. An op is
warmed up, then repeated until its three fastest samples agree: other load on the machine only adds time, so the fastest
samples are the accurate ones. The runs take several sets of operands and results in turn, enough to fill the last-level
cache twice: in a step, a whole model's tensors pass between an op's run in one layer and in the next, so its weights, what
it saves, and the memory it writes to are not in the caches. An op that cannot be run alone (another library's, or one whose
operands take more than a quarter of the free memory) has the roofline's cost, and `plan.summary()` names it.

Times and workspaces are kept in the user's cache directory, in one file for each combination of device, torch version,
number of threads and the settings by which torch chooses kernels.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx

from gcsolve import _torch
from gcsolve.cost.base import Basis, CostModel, OpInfo, Roofline
from gcsolve.cost.devices import DeviceSpec
from gcsolve.cost.flops import node_bytes_moved, registered
from gcsolve.cost.local import free_memory_bytes, is_here
from gcsolve.cost.workspace import remember, workspace
from gcsolve.errors import ArgumentError
from gcsolve.ops.facts import signature
from gcsolve.ops.run import (
    fits,
    fresh_output_bytes,
    lively,
    may_run,
    operand_bytes,
    run_alone,
    well_conditioned,
    zeros,
)
from gcsolve.util.progress import bar

SPREAD = 0.03  # the three fastest samples agree if they are within this share of the fastest
MIN_SAMPLE_S = 3e-4  # a sample runs a short op several times
MAX_OP_S = 1.5  # sampling of one op ends after this time, but not before three samples
MAX_COPIES = 32  # the most sets of operands that take turns
USUAL_CACHE_BYTES = 32 << 20  # of the last-level cache, if the system does not report it
FORMAT = 3  # of the cache file


@dataclass(frozen=True)
class Measured(CostModel):
    """The seconds measured on `device`, by op signature; the roofline's seconds for an op without a measurement.

    `prepare` returns the model with the seconds of a graph's ops. Before that it has none.
    """

    device: DeviceSpec
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    name: ClassVar[str] = "measured"
    unit: ClassVar[str] = "s"

    @classmethod
    def on(cls, device: DeviceSpec) -> Measured:
        """The model for `device`, without measurements yet.

        Raises:
            ArgumentError: this machine does not have that device.
        """
        if not is_here(device):
            raise ArgumentError(
                f"cost='measured' runs ops on {device.name}, which is not here; plan on that machine, or use cost='roofline'"
            )
        return cls(device)

    def prepare(self, nodes: Sequence[fx.Node], progress: bool | None = False) -> Measured:
        """The model with the seconds of the graph's ops; runs each distinct op that is not in the cache on disk."""
        distinct = {signature(n): n for n in nodes if n.op == "call_function" and node_bytes_moved(n)}
        cache = OpCache.of(self.device)
        runs = cache.load()
        for key, run in runs.items():
            if run.workspace_bytes is not None:
                remember(key, self.device, run.workspace_bytes)
        missing = [key for key, n in distinct.items() if key not in runs and may_run(n) and registered(n, "s") is None]
        fresh: dict[str, OpRun] = {}
        with bar(progress if missing else False, len(missing)) as begin:
            for key in missing:
                begin(f"measuring {distinct[key].target}")
                run = measure(distinct[key], self.device)
                if run is not None:
                    fresh[key] = run
        if fresh:
            cache.save(fresh)
        runs = {**runs, **fresh}
        return replace(self, seconds={key: runs[key].seconds for key in distinct if key in runs})

    def cost(self, op: OpInfo) -> float:
        if op.seconds is not None or op.signature not in self.seconds:
            return Roofline(self.device).cost(op)
        return self.seconds[op.signature]

    def basis(self, op: OpInfo) -> Basis:
        """`Basis.MODEL` for seconds that were measured or that `register_cost` gave; else `Basis.FALLBACK`."""
        return Basis.MODEL if op.seconds is not None or op.signature in self.seconds else Basis.FALLBACK


@dataclass(frozen=True, slots=True)
class OpRun:
    """The measurements of one op; `workspace_bytes` is None if the workspace was not measured."""

    seconds: float
    workspace_bytes: int | None


def measure(node: fx.Node, device: DeviceSpec) -> OpRun | None:
    """Measure the op on `device`, which this machine has; None if the op cannot be run alone."""
    if not fits(node, free_memory_bytes(device)):
        return None
    bytes_of_one_run = operand_bytes(node) + sum(fresh_output_bytes(node).values())
    copies = min(MAX_COPIES, 1 + 2 * _cache_bytes(device.kind) // max(1, bytes_of_one_run))
    seconds = run_alone(
        node, device.kind, (lively, zeros, well_conditioned), lambda run: op_seconds(run, device, copies), copies
    )
    if seconds is None:
        return None
    space = workspace(node, device, measure=True)
    return OpRun(seconds, space.size_bytes if space.measured else None)


def op_seconds(run: Callable[[], Any], device: DeviceSpec, warmup: int = 1) -> float:
    """Seconds of one `run()`: the mean of the three fastest samples once they agree or `MAX_OP_S` is over.

    Args:
        run: runs the op once.
        device: where it runs.
        warmup: the number of runs before the first sample.
    """
    sample = _cuda_seconds if device.kind == "cuda" else _host_seconds
    sample(run, warmup)  # here libraries choose algorithms and create handles, and torch's allocator grows
    calls = max(1, math.ceil(MIN_SAMPLE_S / max(sample(run, 1), 1e-7)))
    samples: list[float] = []
    started = time.perf_counter()
    while True:
        samples.append(sample(run, calls))
        fastest = sorted(samples)[:3]
        if len(fastest) == 3 and (fastest[2] <= (1 + SPREAD) * fastest[0] or time.perf_counter() - started > MAX_OP_S):
            return sum(fastest) / 3


@functools.cache
def _cache_bytes(kind: str) -> int:
    """Bytes of the last-level cache of this machine's device of that kind."""
    if kind == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    sizes: list[int] = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)
    return max(sizes, default=USUAL_CACHE_BYTES)


def _host_seconds(run: Callable[[], Any], calls: int) -> float:
    """Seconds a run: CPU seconds if torch has one thread, as other processes then do not count; else wall-clock seconds."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for _ in range(calls):
        run()
    return (clock() - started) / calls


def _cuda_seconds(run: Callable[[], Any], calls: int) -> float:
    """Seconds a run on the GPU, between CUDA events."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before.record()
    for _ in range(calls):
        run()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3 / calls


# --- the cache on disk -----------------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """gcsolve's folder in the user's cache directory: $XDG_CACHE_HOME, else the platform's usual place.

    A user without a home directory has it in the folder for temporary files.
    """
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(tempfile.gettempdir()) / f"gcsolve-{getattr(os, 'getuid', int)()}"
    usual = {"darwin": home / "Library" / "Caches", "win32": Path(os.environ.get("LOCALAPPDATA", home / "AppData"))}
    base = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, home / ".cache")
    return Path(base) / "gcsolve"


@functools.cache
def _processor() -> str:
    """The CPU's model and its number of cores, as the system reports them."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = sorted({line.partition(":")[2].strip() for line in lines if line.startswith("model name")})
    except OSError:
        names = []
    return f"{', '.join(names) or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


_FLOAT32 = (("cuda", "matmul"), ("cudnn", "conv"), ("mkldnn", "matmul"), ("mkldnn", "conv"))


def _settings() -> dict[str, Any]:
    """Those settings of torch that decide, beside an op's arguments, by which kernel and in which precision it runs."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "mkldnn": torch.backends.mkldnn.enabled,
        "float32 in": [_torch.float32_in(*backend) for backend in _FLOAT32],
    }


@dataclass(frozen=True)
class OpCache:
    """One cache file; `header` says for which device, torch version, threads and settings its measurements hold."""

    path: Path
    header: Mapping[str, Any]

    @classmethod
    def of(cls, device: DeviceSpec) -> OpCache:
        """The cache of ops on `device` under this process's torch version, threads and settings."""
        on_gpu = device.kind == "cuda"
        header = {
            "format": FORMAT,
            "device": f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if on_gpu else _processor(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "kernels": _settings(),
        }
        name = hashlib.sha256(json.dumps(header).encode()).hexdigest()[:16]
        return cls(cache_directory() / f"ops-{name}.json", header)

    def load(self) -> dict[str, OpRun]:
        """Op signature -> measurements in the file. If the file is damaged or has another header: a warning, and none."""
        try:
            record = json.loads(self.path.read_text())
            if record["header"] != self.header:
                raise ValueError("its header is another's")
            return {key: _checked(run) for key, run in record["ops"].items()}
        except FileNotFoundError:
            return {}
        except Exception as error:  # a damaged file can raise any kind of exception here
            warnings.warn(f"the cache of measured ops {self.path} is ignored and made again: {error}", stacklevel=2)
            return {}

    def save(self, fresh: Mapping[str, OpRun]) -> None:
        """Add measurements to the file. The file is replaced at once, so other processes never read a part of it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `prepare` loaded the file before, and warned then
            runs = {**self.load(), **fresh}
        text = json.dumps(
            {"header": self.header, "ops": {key: asdict(run) for key, run in sorted(runs.items())}}, indent=1
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
                written = Path(folder) / self.path.name
                written.write_text(text)
                os.replace(written, self.path)
        except OSError as error:
            warnings.warn(f"measured ops could not be kept for the next time ({error})", stacklevel=2)


def _checked(record: dict[str, Any]) -> OpRun:
    """The measurements in one entry of the file; raises if they cannot be such."""
    run = OpRun(**record)
    space = run.workspace_bytes
    if not (type(run.seconds) in (int, float) and math.isfinite(run.seconds) and run.seconds >= 0):
        raise ValueError(f"an op takes {run.seconds!r} s")
    if not (space is None or (type(space) is int and space >= 0)):
        raise ValueError(f"an op's workspace is {space!r} bytes")
    return run
