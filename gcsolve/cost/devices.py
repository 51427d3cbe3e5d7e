"""Devices by name, with their memory, bandwidth and peak arithmetic rates as the vendors print them.

Rates are for dense operands (no structured sparsity). float32 is the rate of the CUDA cores, "tf32" that of tensor cores
on float32, which torch uses if its settings allow; "float8" stands for all 8-bit formats. `memory_bytes` of a GPU is the
printed number at 1 GB = 1e9 bytes, of which the driver keeps some. `launch_s` is a usual time between two small kernels in
eager PyTorch, not a vendor's figure. A plan depends on the ratios of these figures (FLOP to byte to launch) rather than
on their size, so no efficiency is assumed; `calibrated()` measures the rates that a device of this machine reaches.

The `cpu` entry is a constant, so that the same input gives the same plan on every machine. Your own device:

    from gcsolve.cost.devices import DeviceSpec, register_device
    register_device(DeviceSpec("t4", 16e9, 320e9, {"float32": 8.1e12, "float16": 65e12}, source="NVIDIA T4 datasheet"))
    gcsolve.solve(model, x, budget_gb=12, device="t4")
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gcsolve.errors import ArgumentError
from gcsolve.util.checks import number, whole

_CUDA_LAUNCH_S = 5e-6

# kind of device → (share of its memory, least bytes) that a default budget leaves free. CUDA: for the context, what
# libraries allocate without torch's allocator, and its fragmentation. Apple: the memory is the whole machine's, and Metal
# recommends no more than about three quarters of it. CPU: for other processes.
RESERVES = {"cuda": (0.05, 10**9), "mps": (0.25, 10**9), "cpu": (0.1, 10**9)}


_DTYPES = (
    "float16", "bfloat16", "tf32", "float32", "float64", "float8", "complex64", "complex128",
    "int8", "uint8", "int16", "int32", "int64", "bool",
)  # fmt: skip


@dataclass(frozen=True)
class DeviceSpec:
    """The figures of one device.

    Args:
        name: the name that `device=` accepts.
        memory_bytes: its whole memory.
        bandwidth_bytes_per_s: of its main memory.
        peak_flops: dtype ("float32") → FLOP/s. float32 is required, and is the rate of dtypes that are missing.
        launch_s: the least seconds that an op takes.
        allocator_block_bytes: allocations are rounded up to multiples of this.
        kind: "cuda" (ROCm included), "mps" or "cpu", which decides the kernels that run there.
        source: where the figures are from.
        draw_s: seconds that each random number adds, if they are drawn one after the other (on a CPU).

    Raises:
        ArgumentError: memory, block, bandwidth or a rate is not a finite number > 0 (bytes: a whole one), `launch_s` or
            `draw_s` is not one ≥ 0, the name is empty, the kind or a dtype is not known, or float32 is missing.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    launch_s: float = _CUDA_LAUNCH_S
    allocator_block_bytes: int = 512
    kind: str = "cuda"
    source: str = "user"
    draw_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ArgumentError(f"name={self.name!r} of a device must be a text that device= can call it by")
        prefix = f"device {self.name!r}: "
        for label in ("memory_bytes", "allocator_block_bytes"):
            object.__setattr__(self, label, whole(f"{prefix}{label}", getattr(self, label), least=1))
        if not isinstance(self.peak_flops, Mapping) or "float32" not in self.peak_flops:
            content = (
                sorted(map(str, self.peak_flops)) if isinstance(self.peak_flops, Mapping) else repr(self.peak_flops)
            )
            raise ArgumentError(f"{prefix}peak_flops has no float32, only {content}")
        for dtype in self.peak_flops:
            if dtype not in _DTYPES:
                raise ArgumentError(f"{prefix}peak_flops[{dtype!r}] is no dtype; known: {', '.join(_DTYPES)}")
        rates = {f"peak_flops[{k!r}]": v for k, v in self.peak_flops.items()}
        for label, figure in {"bandwidth_bytes_per_s": self.bandwidth_bytes_per_s, **rates}.items():
            number(f"{prefix}{label}", figure, above=0)
        if self.kind not in RESERVES:
            raise ArgumentError(
                f"device {self.name!r}: kind={self.kind!r} is not known; known kinds: {', '.join(RESERVES)}"
            )
        number(f"{prefix}launch_s", self.launch_s)
        number(f"{prefix}draw_s", self.draw_s)

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.bandwidth_bytes_per_s, self.launch_s, self.draw_s))

    def peak_for(self, dtype: str) -> float:
        """FLOP/s for a dtype, as in "bfloat16", "tf32" or "float8_e4m3fn".

        A dtype that `peak_flops` does not have gets float32's rate; an 8-bit float gets float16's, if that is there.
        """
        if dtype.startswith("float8"):
            return self.peak_flops.get("float8", self.peak_for("float16"))
        return self.peak_flops.get(dtype, self.peak_flops["float32"])

    @property
    def reserve_bytes(self) -> int:
        """Bytes of its memory that a default budget leaves free, by `RESERVES`."""
        share, least = RESERVES[self.kind]
        return max(int(share * self.memory_bytes), least)


def _gpu(
    name: str,
    memory_gb: float,
    bandwidth_gb_s: float,
    tflops: tuple[float, ...],
    source: str,
    kind: str = "cuda",
) -> DeviceSpec:
    """A GPU from figures in GB, GB/s and TFLOP/s in the order of `_COLUMNS`; 0: the GPU has no arithmetic in that dtype."""
    peaks = {dtype: figure * 1e12 for dtype, figure in zip(_COLUMNS, tflops, strict=True) if figure}
    return DeviceSpec(
        name=name,
        memory_bytes=int(memory_gb * 1e9),
        bandwidth_bytes_per_s=bandwidth_gb_s * 1e9,
        peak_flops=peaks,
        kind=kind,
        source=source,
    )


_COLUMNS = ("float16", "bfloat16", "tf32", "float32", "float64", "float8")
_NV = "NVIDIA"
_HALVED = "half of the sparse rate"
_SIXTY_FOURTH = "float64: 1/64 of float32"


def _rate(cores: int, clock_ghz: float) -> str:
    """The source of a chip's FLOP/s if Apple does not publish them."""
    return f"largest memory; rate: {cores} cores × 128 lanes × 2 × {clock_ghz} GHz, not Apple's figure"


# name, memory GB, bandwidth GB/s, dense TFLOP/s in the order of _COLUMNS (tensor cores, accumulating in float32)
_GPUS = (
    _gpu("rtx3090", 24, 936, (71, 71, 35.6, 35.6, 0.556, 0), f"{_NV} GA102 whitepaper ({_SIXTY_FOURTH})"),
    _gpu(
        "rtx4090",
        24,
        1008,
        (165.2, 165.2, 82.6, 82.6, 1.29, 330.3),
        f"{_NV} Ada GPU architecture whitepaper ({_SIXTY_FOURTH})",
    ),
    _gpu(
        "rtx5090",
        32,
        1792,
        (209.5, 209.5, 104.8, 104.8, 1.64, 419),
        f"{_NV} RTX Blackwell architecture whitepaper ({_SIXTY_FOURTH})",
    ),
    _gpu(
        "a10", 24, 600, (125, 125, 62.5, 31.2, 0.488, 0), f"{_NV} A10 datasheet and GA102 whitepaper ({_SIXTY_FOURTH})"
    ),
    _gpu("l4", 24, 300, (121, 121, 60, 30.3, 0.473, 242.5), f"{_NV} L4 datasheet ({_HALVED}; {_SIXTY_FOURTH})"),
    _gpu("l40s", 48, 864, (362.05, 362.05, 183, 91.6, 1.43, 733), f"{_NV} L40S datasheet ({_SIXTY_FOURTH})"),
    _gpu("a100-40gb", 40, 1555, (312, 312, 156, 19.5, 9.7, 0), f"{_NV} A100 datasheet, SXM 40 GB"),
    _gpu("a100-80gb", 80, 2039, (312, 312, 156, 19.5, 9.7, 0), f"{_NV} A100 datasheet, SXM 80 GB"),
    _gpu("h100-pcie", 80, 2000, (756, 756, 378, 51, 26, 1513), f"{_NV} H100 datasheet, PCIe ({_HALVED})"),
    _gpu("h100-sxm", 80, 3350, (989, 989, 494.5, 67, 34, 1979), f"{_NV} H100 datasheet, SXM ({_HALVED})"),
    _gpu("h200", 141, 4800, (989, 989, 494.5, 67, 34, 1979), f"{_NV} H200 datasheet, SXM ({_HALVED})"),
    _gpu(
        "b200", 180, 7700, (2250, 2250, 1100, 75, 37, 4500), f"{_NV} Blackwell datasheet, HGX B200 per GPU ({_HALVED})"
    ),
    _gpu("mi300x", 192, 5300, (1307.4, 1307.4, 653.7, 163.4, 81.7, 2614.9), "AMD Instinct MI300X data sheet"),
    _gpu(
        "v100",
        32,
        900,
        (125, 15.7, 0, 15.7, 7.8, 0),
        f"{_NV} V100 datasheet, SXM2 32 GB (bfloat16 emulated in float32)",
    ),
    *(
        _gpu(name, memory_gb, bandwidth_gb_s, (single, single, 0, single, 0, 0), f"Apple {source}", "mps")
        for name, memory_gb, bandwidth_gb_s, single, source in (
            ("m1", 16, 68, 2.6, "M1 announcement; largest memory"),
            ("m1-max", 64, 400, 10.4, "M1 Max announcement; largest memory"),
            ("m1-ultra", 128, 800, 21, "M1 Ultra announcement; largest memory"),
            ("m2", 24, 100, 3.6, "M2 announcement; largest memory"),
            ("m2-ultra", 192, 800, 27.2, "M2 Ultra announcement; largest memory"),
            ("m3", 24, 100, 3.58, f"M3 announcement and iMac specifications; {_rate(10, 1.398)}"),
            ("m3-max", 128, 400, 14.3, f"M3 Max announcement and MacBook Pro specifications; {_rate(40, 1.398)}"),
            ("m3-ultra", 512, 819, 28.6, f"M3 Ultra announcement and Mac Studio specifications; {_rate(80, 1.398)}"),
            ("m4", 32, 120, 3.76, f"M4 announcement; {_rate(10, 1.47)}"),
            ("m4-pro", 64, 273, 8.08, f"M4 Pro announcement; {_rate(20, 1.578)}"),
            ("m4-max", 128, 546, 16.2, f"M4 Max announcement; {_rate(40, 1.578)}"),
        )
    ),
)


def _physical_memory_bytes() -> int:
    """Bytes of this machine's main memory; 16 GB if the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return 16 * 10**9


# Rounded from a 2-core AVX2 cloud server (torch 2.14: 1024³ matmuls, additions of large tensors, small additions).
# The rates of half precision are those of a CPU without instructions for it.
_CPU = DeviceSpec(
    name="cpu",
    memory_bytes=_physical_memory_bytes(),
    bandwidth_bytes_per_s=12e9,
    peak_flops={"float32": 120e9, "float64": 60e9, "bfloat16": 1e9, "float16": 1e9},
    launch_s=5e-6,
    allocator_block_bytes=64,
    kind="cpu",
    source="nominal: constants rounded from measurements on a 2-core AVX2 server",
    draw_s=7e-9,
)

_DEVICES: dict[str, DeviceSpec] = {spec.name: spec for spec in (_CPU, *_GPUS)}

# Pattern of the name that torch reports → name in the table; the first match wins.
_CUDA_NAMES: tuple[tuple[str, str], ...] = (
    (r"H200", "h200"),
    (r"B200", "b200"),
    (r"H100.*PCIE", "h100-pcie"),
    (r"H100", "h100-sxm"),
    (r"A100.*80GB", "a100-80gb"),
    (r"A100", "a100-40gb"),
    (r"V100", "v100"),
    (r"L40S", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bA10G?\b", "a10"),
    (r"RTX 3090", "rtx3090"),
    (r"RTX 4090", "rtx4090"),
    (r"RTX 5090", "rtx5090"),
    (r"MI300X", "mi300x"),
)


def devices() -> tuple[DeviceSpec, ...]:
    """All devices that `device=` accepts by name."""
    return tuple(_DEVICES.values())


def register_device(spec: DeviceSpec) -> None:
    """Let `device=` accept `spec` by its name, in any case, in this process; it replaces a device of that name.

    Raises:
        ArgumentError: `spec` is not a `DeviceSpec`, or the device of that name is of another kind.
    """
    if not isinstance(spec, DeviceSpec):
        raise ArgumentError(f"spec={spec!r} is not a gcsolve.DeviceSpec")
    name = spec.name.lower()
    if name in _DEVICES and _DEVICES[name].kind != spec.kind:
        raise ArgumentError(
            f"spec.name={spec.name!r} is a device of kind {_DEVICES[name].kind!r}, and the spec is of kind={spec.kind!r}; "
            f"give it another name, or kind={_DEVICES[name].kind!r}"
        )
    _DEVICES[name] = spec


def get_device(device: str | DeviceSpec | Any) -> DeviceSpec:
    """The spec of a device.

    Args:
        device: a name ("rtx4090", "NVIDIA RTX 4090"), a torch device ("cuda:1", `torch.device`), or a spec, which is
            returned as it is. "cuda" is this machine's GPU, with its real memory and the table's figures for its model. A
            GPU that is not in the table gets the A100's figures, of which a plan needs the ratios only; `source` says so.

    Raises:
        ArgumentError: the name is not known (the text lists the known names), or it is "cuda" and there is no GPU.
    """
    if isinstance(device, DeviceSpec):
        return device
    name = str(device).lower()
    if name in _DEVICES:
        return _DEVICES[name]
    if re.fullmatch(r"cpu(:\d+)?", name):
        return _CPU
    if re.fullmatch(r"cuda(:\d+)?", name):
        return _this_gpu(name)
    bare_name = _bare(name)
    candidates = [spec for spec in _DEVICES.values() if bare_name and _bare(spec.name.lower()).startswith(bare_name)]
    for spec in candidates:
        if _bare(spec.name.lower()) == bare_name:
            return spec
    known = ", ".join(["cuda", *_DEVICES])
    suggestion = f"; {' or '.join(spec.name for spec in candidates)}?" if candidates else ";"
    raise ArgumentError(f"device={device!r} is not known{suggestion} known devices: {known}")


def _bare(name: str) -> str:
    """A device's name without vendor, brand and separators: "nvidia rtx 4090" -> "rtx4090"."""
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|apple|[\s_-]", "", name)


def _this_gpu(name: str) -> DeviceSpec:
    """The spec of this machine's GPU that torch calls `name` ("cuda:1"), with its real memory."""
    import torch

    if not torch.cuda.is_available():
        known = ", ".join(_DEVICES)
        raise ArgumentError(f"device={name!r}: no GPU is visible here; name the one to plan for: {known}")
    properties = torch.cuda.get_device_properties(name)
    for pattern, known_name in _CUDA_NAMES:
        if re.search(pattern, properties.name.upper()):
            return replace(_DEVICES[known_name], memory_bytes=properties.total_memory)
    stand_in = _DEVICES["a100-80gb"]
    source = f"{properties.name} is not in the table; figures of {stand_in.name}"
    return replace(stand_in, name=properties.name, memory_bytes=properties.total_memory, source=source)


@functools.cache
def calibrated(device: str = "cpu") -> DeviceSpec:
    """The spec of this machine's `device` ("cpu" or "cuda") with the rates that it reaches, measured once in a process.

    Pass it as `device=`; plans then differ from machine to machine. Each figure is the median of several runs; all take
    about half a second.

    Raises:
        ArgumentError: this machine does not have that device.
    """
    import torch

    spec = get_device(device)
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", device):
        raise ArgumentError(f"device={device!r} is not here; calibrate on the machine that has it, as device='cuda'")
    on_gpu = spec.kind == "cuda"

    def median_s(run: Callable[[], Any], repeats: int = 7) -> float:
        run()
        seconds = []
        for _ in range(repeats):
            finish()
            started = time.perf_counter()
            run()
            finish()
            seconds.append(time.perf_counter() - started)
        return sorted(seconds)[repeats // 2]

    def finish() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    size = 8192 if on_gpu else 512
    peaks: dict[str, float] = {}
    dtypes = [torch.float32, torch.float64, torch.bfloat16] + ([torch.float16] if on_gpu else [])
    for dtype in dtypes:
        a = torch.ones(size, size, dtype=dtype, device=device)
        peaks[str(dtype).removeprefix("torch.")] = 2 * size**3 / median_s(lambda a=a: a @ a, 5)
    if not on_gpu:
        peaks["float16"] = peaks["bfloat16"]
    large = torch.ones(1 << (28 if on_gpu else 24), device=device)
    small = torch.ones(8, device=device)
    mask = torch.ones(1 << 20, dtype=torch.bool, device=device)
    generator = torch.Generator(device)  # not the default one, whose state is the user's
    return replace(
        spec,
        bandwidth_bytes_per_s=2 * large.nbytes / median_s(lambda: large + large),
        peak_flops=_reached(spec.peak_flops, peaks),
        launch_s=median_s(lambda: [small + small for _ in range(100)]) / 100,
        source="measured on this machine",
        draw_s=0.0 if on_gpu else median_s(lambda: mask.bernoulli_(0.9, generator=generator)) / mask.numel(),
    )


def _reached(printed: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """dtype → FLOP/s: the measured rate, or else (tf32, float8) the same share of the printed rate as float16 reaches."""
    share = measured["float16"] / printed["float16"] if "float16" in printed else 1.0
    return {dtype: measured.get(dtype, share * rate) for dtype, rate in printed.items()} | dict(measured)
