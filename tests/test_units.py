"""Bytes and seconds as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat import InputError
from remat.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        (2**40, 2**40),
        ("512", 512),
        ("512 B", 512),
        ("16GiB", 16 * 2**30),
        ("16GB", 16 * 10**9),
        ("16 gib", 16 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("0.5KB", 500),
        ("2TiB", 2**41),
        ("80%", 800),
        ("12.5 %", 125),
        ("100%", 1000),
    ],
)
def test_parse(text, nbytes):
    assert parse_bytes(text, total=1000) == nbytes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a number of bytes"),
        ("GiB", "not a number of bytes"),
        ("-1GiB", "not a number of bytes"),
        ("1e9", "unknown unit|not a number"),
        ("16 GiB free", "not a number of bytes"),
        ("16Gi", "unknown unit 'Gi'"),
        ("101%", "more than the whole device"),
        ("0%", "more than 0 bytes"),
        ("0.2 B", "more than 0 bytes"),
        (0, "more than 0 bytes"),
        (-5, "more than 0 bytes"),
        (1.5, "is a float"),
        (True, "is a bool"),
        (None, "is a NoneType"),
    ],
)
def test_refused_with_examples(text, words):
    with pytest.raises(InputError, match=words) as caught:
        parse_bytes(text, total=1000, what="limit")
    assert "limit=" in str(caught.value)
    assert '"16GiB"' in str(caught.value)


def test_a_share_needs_a_total():
    with pytest.raises(InputError, match="memory size is known"):
        parse_bytes("80%")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (12 * 2**30, "12.0 GiB"),
        (2**40, "1.0 TiB"),
        (5 * 2**50, "5120.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (0.00041, "410 us"),
        (0.0123, "12.3 ms"),
        (1.0, "1.00 s"),
        (75.5, "75.50 s"),
        (-0.002, "-2.0 ms"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@given(st.integers(1, 2**53))  # text is read through a float
def test_text_comes_back_within_its_precision(nbytes):
    assert parse_bytes(str(nbytes)) == nbytes
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= max(1, 0.051 * nbytes)
