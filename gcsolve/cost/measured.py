"""`cost="measured"`: seconds of each distinct op, run alone on the machine where the plan will run.

Each signature (op, shapes, strides, dtypes, other arguments) is run once a machine, however many layers repeat it: warmed
up, then repeated until its three fastest runs agree (what a busy machine adds is never less than nothing, so the fast
runs are the true ones). Sets of operands and results take turns, as many as twice fill the last cache: in a step a whole
model's tensors pass between an op's run in one layer and in the next, so its weights, what it saves, and the memory it
writes to are not in the caches. An op that cannot be run alone (another library's, or operands beyond a quarter of the
free memory) is costed by the roofline, and `plan.summary()` names it.

Times and workspaces are kept in the user's cache directory, one file a device, torch version, number of threads and set of
torch's settings that choose kernels.
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

SPREAD = 0.03  # the three fastest samples of an op lie within this share of the fastest
MIN_SAMPLE_S = 3e-4  # short ops are run several times a sample
MAX_OP_S = 1.5  # sampling of one op ends here, but not before three samples
MAX_COPIES = 32  # sets of operands that take turns
USUAL_CACHE_BYTES = 32 << 20  # where the system does not tell
FORMAT = 3


@dataclass(frozen=True)
class Measured(CostModel):
    """Seconds measured on `device`, by op signature; the roofline's for an op that is not among them.

    `prepare` runs the ops whose time is not known yet; before it, no op's time is.
    """

    device: DeviceSpec
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    name: ClassVar[str] = "measured"
    unit: ClassVar[str] = "s"

    @classmethod
    def on(cls, device: DeviceSpec) -> Measured:
        """
        Raises:
            ArgumentError: that device is not here.
        """
        if not is_here(device):
            raise ArgumentError(
                f"cost='measured' runs ops on {device.name}, which is not here; plan on that machine, or use cost='roofline'"
            )
        return cls(device)

    def prepare(self, nodes: Sequence[fx.Node], progress: bool | None = False) -> Measured:
        """With the seconds of a graph's ops; runs each distinct op that neither this process nor the cache on disk knows."""
        distinct = {signature(n): n for n in nodes if n.op == "call_function" and node_bytes_moved(n)}
        cache = OpCache.of(self.device)
        runs = cache.load()
        for key, run in runs.items():
            if run.workspace_bytes is not None:
                remember(key, self.device, run.workspace_bytes)
        todo = [key for key, n in distinct.items() if key not in runs and may_run(n) and registered(n, "s") is None]
        fresh: dict[str, OpRun] = {}
        with bar(progress if todo else False, len(todo)) as begin:
            for key in todo:
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
        """Nothing is measured of a view; where `register_cost` gave seconds, nothing has to be."""
        return Basis.MODEL if op.seconds is not None or op.signature in self.seconds else Basis.FALLBACK


@dataclass(frozen=True, slots=True)
class OpRun:
    """What running one op showed. `workspace_bytes`: None when it was not measured."""

    seconds: float
    workspace_bytes: int | None


def measure(node: fx.Node, device: DeviceSpec) -> OpRun | None:
    """Run the op on `device`, which is here; None when it cannot be run alone."""
    if not fits(node, free_memory_bytes(device)):
        return None
    touched = operand_bytes(node) + sum(fresh_output_bytes(node).values())
    copies = min(MAX_COPIES, 1 + 2 * _cache_bytes(device.kind) // max(1, touched))
    seconds = run_alone(
        node, device.kind, (lively, zeros, well_conditioned), lambda run: op_seconds(run, device, copies), copies
    )
    if seconds is None:
        return None
    space = workspace(node, device, measure=True)
    return OpRun(seconds, space.size_bytes if space.measured else None)


def op_seconds(run: Callable[[], Any], device: DeviceSpec, warmup: int = 1) -> float:
    """Seconds of one `run()`: the mean of the three fastest samples once they agree, or when time is up."""
    sample = _cuda_seconds if device.kind == "cuda" else _host_seconds
    sample(run, warmup)  # libraries choose algorithms and make their handles, memory is taken
    calls = max(1, math.ceil(MIN_SAMPLE_S / max(sample(run, 1), 1e-7)))
    samples: list[float] = []
    began = time.perf_counter()
    while True:
        samples.append(sample(run, calls))
        fastest = sorted(samples)[:3]
        if len(fastest) == 3 and (fastest[2] <= (1 + SPREAD) * fastest[0] or time.perf_counter() - began > MAX_OP_S):
            return sum(fastest) / 3


@functools.cache
def _cache_bytes(kind: str) -> int:
    """Bytes of the last cache before the memory of that kind of device, which is here."""
    if kind == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    sizes: list[int] = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)
    return max(sizes, default=USUAL_CACHE_BYTES)


def _host_seconds(run: Callable[[], Any], calls: int) -> float:
    """Of one thread, CPU seconds: what other processes take meanwhile is not the op's. Of several, wall seconds."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for _ in range(calls):
        run()
    return (clock() - started) / calls


def _cuda_seconds(run: Callable[[], Any], calls: int) -> float:
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
    """Where the user's caches live: $XDG_CACHE_HOME, else the platform's usual place; for a user who has no home directory,
    in the folder for temporary files."""
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(tempfile.gettempdir()) / f"gcsolve-{getattr(os, 'getuid', int)()}"
    usual = {"darwin": home / "Library" / "Caches", "win32": Path(os.environ.get("LOCALAPPDATA", home / "AppData"))}
    base = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, home / ".cache")
    return Path(base) / "gcsolve"


@functools.cache
def _processor() -> str:
    """The CPU in words, as exactly as the system tells."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = sorted({line.partition(":")[2].strip() for line in lines if line.startswith("model name")})
    except OSError:
        names = []
    return f"{', '.join(names) or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


_FLOAT32 = (("cuda", "matmul"), ("cudnn", "conv"), ("mkldnn", "matmul"), ("mkldnn", "conv"))


def _settings() -> dict[str, Any]:
    """What makes torch run an op by another kernel, or in another precision, than its arguments say."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "mkldnn": torch.backends.mkldnn.enabled,
        "float32 in": [_torch.float32_in(*of) for of in _FLOAT32],
    }


@dataclass(frozen=True)
class OpCache:
    """One file: `header` says what its times hold for, `path` where it lies."""

    path: Path
    header: Mapping[str, Any]

    @classmethod
    def of(cls, device: DeviceSpec) -> OpCache:
        """The cache for what runs on `device` in this process."""
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
        """What the file knows; nothing, with a warning, when it is not ours or damaged."""
        try:
            found = json.loads(self.path.read_text())
            if found["header"] != self.header:
                raise ValueError("its header is another's")
            return {key: _checked(run) for key, run in found["ops"].items()}
        except FileNotFoundError:
            return {}
        except Exception as error:  # there is no list of what a damaged file makes its reader raise
            warnings.warn(f"the cache of measured ops {self.path} is ignored and made again: {error}", stacklevel=2)
            return {}

    def save(self, fresh: Mapping[str, OpRun]) -> None:
        """Add to the file; another process sees either the old file or the new one."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said when it was loaded
            runs = {**self.load(), **fresh}
        text = json.dumps(
            {"header": self.header, "ops": {key: asdict(run) for key, run in sorted(runs.items())}}, indent=1
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent) as aside:
                part = Path(aside) / self.path.name
                part.write_text(text)
                os.replace(part, self.path)
        except OSError as error:
            warnings.warn(f"measured ops could not be kept for the next time ({error})", stacklevel=2)


def _checked(run: dict[str, Any]) -> OpRun:
    made = OpRun(**run)
    space = made.workspace_bytes
    if not (type(made.seconds) in (int, float) and math.isfinite(made.seconds) and made.seconds >= 0):
        raise ValueError(f"an op takes {made.seconds!r} s")
    if not (space is None or (type(space) is int and space >= 0)):
        raise ValueError(f"an op's workspace is {space!r} bytes")
    return made
