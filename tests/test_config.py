import pytest

from hydra_tune.config import align, format_bytes, parse_bytes
from hydra_tune.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [(4096, 4096), ("4096", 4096), ("20GiB", 20 << 30), ("1.5 GB", 1_500_000_000), ("512 KiB", 512 << 10), ("7B", 7)],
)
def test_bytes_are_read(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "20 GiBs", "-1GiB", 0, -5, True, 1.5, None, "0 B", "1e9"])
def test_what_is_not_bytes_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"positive number of bytes.*20GiB"):
        parse_bytes(text)


def test_bytes_are_written_short():
    assert [format_bytes(n) for n in (0, 512, 1536, 20 << 30, 3 << 40)] == [
        "0 B",
        "512 B",
        "1.5 KiB",
        "20.0 GiB",
        "3.0 TiB",
    ]


def test_alignment_is_that_of_a_slot():
    assert [align(n) for n in (1, 512, 513)] == [512, 512, 1024]


@pytest.mark.parametrize("amount", [1, 1023, 1024, 74_500, 74_548, 1_049_000, (20 << 20) + 1, (8 << 30) - 1])
def test_a_budget_that_is_said_to_suffice_does(amount):
    """72.75 KiB were said as 72.7, which were refused."""
    assert amount <= parse_bytes(format_bytes(amount, up=True)) < 1.1 * amount + 1
