"""Accelerators by name."""

import pytest

from remat.devices import DEVICES, Device, device
from remat.errors import InputError


@pytest.mark.parametrize("name", ["h100-80gb", "h200", "a100-40gb", "a100-80gb", "l40s", "rtx4090", "t4"])
def test_presets(name):
    found = device(name)
    assert found.name == name
    assert found.note  # says where the numbers come from
    assert found.half_flops_per_second >= found.single_flops_per_second
    assert found.link_bytes_per_second > 0


def test_names_are_read_kindly():
    assert device(" H100_80GB ") is DEVICES["h100-80gb"]


def test_own_numbers_are_taken_as_they_are():
    mine = Device("mine", 24 * 2**30, 0.9e12, 150e12, 40e12)
    assert device(mine) is mine
    assert mine.flops_per_second("bfloat16") == 150e12
    assert mine.flops_per_second("float32") == 40e12


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("h100", "did you mean 'h100-80gb'"),
        ("a100", "did you mean 'a100-40gb' or 'a100-80gb'"),
        ("rtx-4090", "did you mean 'rtx4090'"),
        ("abacus", "known are h100-80gb, h200"),
        (80, "say a name"),
    ],
)
def test_unknown_devices(given, sentence):
    with pytest.raises(InputError, match=sentence):
        device(given)


@pytest.mark.parametrize("field", ["total_bytes", "bytes_per_second"])
def test_numbers_are_checked(field):
    numbers = {"total_bytes": 1, "bytes_per_second": 1.0, "half_flops_per_second": 1.0}
    with pytest.raises(InputError, match=f"{field}=0 must be a number above 0"):
        Device("mine", single_flops_per_second=1.0, **{**numbers, field: 0})
