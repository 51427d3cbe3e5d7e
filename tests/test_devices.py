"""cost/devices.py: the table of devices, names, reserves, calibration, and devices of one's own."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from gcsolve.cost import devices as device_room
from gcsolve.cost.devices import RESERVES, DeviceSpec, calibrated, devices, get_device, register_device
from gcsolve.errors import ArgumentError
from tests.tracing import CPU, H100


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("A100-80GB", "a100-80gb"),
        ("Apple M3 Max", "m3-max"),
    ],
)
def test_a_device_is_known_by_the_name_on_the_box(given, name):
    assert get_device(given).name == name


def test_a_name_that_several_devices_could_have_lists_them():
    with pytest.raises(
        ArgumentError, match=r"device='A100' is not known; a100-40gb or a100-80gb\? known devices: cuda, "
    ):
        get_device("A100")
    with pytest.raises(ArgumentError, match=r"device='nvidia' is not known; known devices: cuda, "):
        get_device("nvidia")


def test_a_rate_that_is_computed_is_what_its_source_says():
    sources = [(d, re.search(r"(\d+) cores × 128 lanes × 2 × ([\d.]+) GHz", d.source)) for d in devices()]
    computed = [(d, int(match[1]), float(match[2])) for d, match in sources if match]
    assert computed
    for device, cores, gigahertz in computed:
        expected = cores * 128 * 2 * gigahertz * 1e9
        assert device.peak_flops["float32"] == pytest.approx(expected, rel=0.005)


def test_a_float64_rate_is_the_share_of_float32_that_its_source_says():
    sources = [(d, re.search(r"float64: 1/(\d+) of float32", d.source)) for d in devices()]
    shares = [(d, int(match[1])) for d, match in sources if match]
    assert shares
    for device, share in shares:
        assert device.peak_flops["float64"] == pytest.approx(device.peak_flops["float32"] / share, rel=0.005)


def test_table_is_plausible():
    for spec in devices():
        assert spec.source
        assert spec.allocator_block_bytes == (64 if spec.kind == "cpu" else 512)
        if spec.kind == "cuda":
            assert 16e9 <= spec.memory_bytes <= 300e9
            assert 2e11 <= spec.bandwidth_bytes_per_s <= 1e13
            # a GPU's balance for half precision lies between 70 and 450 FLOP a byte
            assert 70 <= spec.peak_flops["float16"] / spec.bandwidth_bytes_per_s <= 450
            assert spec.peak_flops["float16"] > spec.peak_flops["float32"] > spec.peak_flops["float64"]
            # 8 bits run at twice the rate of 16, float32 on tensor cores at half of it
            assert spec.peak_flops.get("float8", 0) / spec.peak_flops["float16"] == pytest.approx(2, rel=0.03) or (
                "float8" not in spec.peak_flops
            )
            assert spec.peak_flops.get("tf32", 0) / spec.peak_flops["float16"] == pytest.approx(0.5, rel=0.03) or (
                "tf32" not in spec.peak_flops
            )


def test_peaks_by_dtype_fall_back():
    peaks = {"float32": 1.0, "tf32": 2.0, "float16": 4.0, "float8": 8.0}
    full = DeviceSpec("full", 1, 1.0, peaks)
    assert full.peak_for("float8_e5m2") == full.peak_for("float8_e4m3fn") == 8.0
    assert full.peak_for("tf32") == 2.0
    plain = DeviceSpec("plain", 1, 1.0, {"float32": 1.0, "float16": 4.0})
    assert plain.peak_for("float8_e4m3fn") == 4.0  # none of its own: as fast as 16 bits
    assert plain.peak_for("tf32") == plain.peak_for("int64") == 1.0


def test_a_reserve_is_a_share_of_the_memory_and_a_gigabyte_at_least():
    for kind in RESERVES:
        tiny, large, twice = (DeviceSpec("d", size, 1.0, {"float32": 1.0}, kind=kind) for size in (2e9, 1e11, 2e11))  # type: ignore[arg-type]
        assert tiny.reserve_bytes == 10**9
        assert twice.reserve_bytes == 2 * large.reserve_bytes > 2 * 10**9


def test_unknown_device_lists_the_known():
    with pytest.raises(ArgumentError, match=r"'h9000'.*cuda.*h100-sxm.*v100"):
        get_device("h9000")


def test_device_by_torch_device_and_spec():
    assert get_device(torch.device("cpu")) is CPU
    assert get_device(H100) is H100
    assert get_device("H100-SXM") is H100


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_cuda_without_a_gpu_names_what_to_plan_for():
    with pytest.raises(ArgumentError, match=r"no GPU.*h200"):
        get_device("cuda")


def test_own_device_in_three_lines(monkeypatch):
    monkeypatch.setattr(device_room, "_DEVICES", dict(device_room._DEVICES))
    register_device(DeviceSpec("t4", 16e9, 320e9, {"float32": 8.1e12}, source="NVIDIA T4 datasheet"))  # type: ignore[arg-type]
    assert get_device("t4").memory_bytes == 16 * 10**9


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"bandwidth_bytes_per_s": math.nan}, "bandwidth_bytes_per_s=nan"),
        ({"peak_flops": {"float16": 1e12}}, "no float32"),
        ({"peak_flops": {"float32": -1.0}}, "float32"),
        ({"launch_s": -1.0}, "launch_s"),
        ({"launch_s": None}, "launch_s=None must be a finite number ≥ 0"),
        ({"memory_bytes": math.nan}, "device 'bad': memory_bytes=nan must be a whole number ≥ 1"),
        ({"memory_bytes": None}, "memory_bytes=None"),
        ({"memory_bytes": "16e9"}, "memory_bytes='16e9'"),
        ({"memory_bytes": True}, "memory_bytes=True"),
        ({"allocator_block_bytes": 0.5}, r"allocator_block_bytes=0\.5 must be a whole number"),
        ({"bandwidth_bytes_per_s": None}, "bandwidth_bytes_per_s=None must be a finite number above 0"),
        ({"peak_flops": None}, "peak_flops has no float32, only None"),
        ({"peak_flops": {"float32": None}}, r"peak_flops\['float32'\]=None"),
        ({"peak_flops": {"float32": 1.0, "fp16": 2.0}}, r"peak_flops\['fp16'\] is no dtype; known: float16"),
        ({"name": ""}, "name='' of a device"),
        ({"name": None}, "name=None of a device"),
        ({"kind": "tpu"}, "kind='tpu'.*cuda, mps, cpu"),
    ],
)
def test_bad_figures_are_refused(figures, text):
    good: dict[str, Any] = {"memory_bytes": 1, "bandwidth_bytes_per_s": 1.0, "peak_flops": {"float32": 1.0}}
    with pytest.raises(ArgumentError, match=text):
        DeviceSpec(**{"name": "bad", **good, **figures})


def test_what_register_device_refuses(monkeypatch):
    monkeypatch.setattr(device_room, "_DEVICES", dict(device_room._DEVICES))
    with pytest.raises(ArgumentError, match=r"spec=None is not a gcsolve\.DeviceSpec"):
        register_device(None)  # type: ignore[arg-type]
    figures: dict[str, Any] = {"memory_bytes": 1, "bandwidth_bytes_per_s": 1.0, "peak_flops": {"float32": 1.0}}
    with pytest.raises(
        ArgumentError, match=r"spec\.name='CPU' is a device of kind 'cpu', and the spec is of kind='cuda'"
    ):
        register_device(DeviceSpec("CPU", **figures))
    register_device(DeviceSpec("MyCard", **figures))
    assert get_device("mycard").name == "MyCard"


def test_calibrated_is_measured_once():
    spec = calibrated()
    assert spec is calibrated()
    with pytest.raises(ArgumentError, match="not here"):
        calibrated("h200")
    assert spec.source == "measured on this machine"
    assert 1e9 < spec.peak_flops["float32"] < 1e14
    assert 1e8 < spec.bandwidth_bytes_per_s < 1e13


def test_rates_that_are_not_measured_reach_the_share_that_float16_does():
    told = {"float32": 10.0, "float16": 100.0, "tf32": 50.0, "float8": 200.0}
    measured = {"float32": 8.0, "float16": 70.0, "bfloat16": 60.0}
    assert device_room._reached(told, measured) == {**measured, "tf32": 35.0, "float8": 140.0}
    assert device_room._reached({"float32": 10.0}, measured) == measured
