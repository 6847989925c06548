"""What a checkpoint's files hold, and that one which is torn is not believed."""

import json
import logging
from collections import Counter, OrderedDict

import numpy
import pytest
import torch

from hydra_tune.checkpoints.checkpoint_folder import CheckpointFolder, Position
from hydra_tune.checkpoints.plain_state import decode, encode
from hydra_tune.errors import ConfigError

STATES = {
    "plain": {"step": 3, "lr": 1e-3, "best": float("inf"), "name": "x", "on": True, "none": None, "empty": {}},
    "nested": [(1, (2.5, "a")), {0: "a", (1, 2): "b"}, {"$odd": 1}, {3, 1}, b"\x00\xff", 1 - 2j],
    "counted": [Counter({30: 1, 60: 2}), OrderedDict([("b", 1), ("a", 2)]), torch.float16, torch.device("cpu")],
    "numbers": [numpy.float32(0.1), numpy.arange(6).reshape(2, 3)],
}


def test_sets_and_keys_of_several_types_are_held_as_they_are():
    """Their values have no order among themselves: a TypeError ended the checkpoints."""
    state = [{1, "b", None, (1, "a"), 2.5, 1j}, frozenset({1, "b"}), {1: "a", "b": 2, None: {frozenset(), b"c"}}]
    tensors = {}
    assert decode(json.loads(json.dumps(encode(state, tensors, "state"))), tensors) == state


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_plain_values_are_held_as_they_are(state):
    tensors = {}
    code = json.loads(json.dumps(encode(state, tensors, "state")))
    assert repr(decode(code, tensors)) == repr(state)


TENSORS = [torch.randn(3, 4).to(d) for d in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn)]
TENSORS += [torch.tensor(7), torch.zeros(0, 3), torch.randn(2, dtype=torch.complex64), torch.tensor([True, False])]
TENSORS += [
    torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.randn(4, 6)[:, ::2],
    torch.randn(3).t(),
]


def test_tensors_keep_bits_dtype_shape_and_strides(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.write(Position(0, 1), {"tensors": TENSORS})
    _, state = folder.newest()
    for tensor, read in zip(TENSORS, state["tensors"], strict=True):
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert read.contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
        dense = tensor.numel() > 0 and tensor.stride() != (6, 2)
        assert read.stride() == tensor.stride() or not dense


def test_a_weight_with_two_names_is_written_once(tmp_path):
    weight = torch.randn(4, 4)
    CheckpointFolder(tmp_path).write(Position(0, 1), {"a": weight, "b": weight, "c": weight[:2], "d": weight.t()})
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "000-000000001" / "tensors.safetensors")
    assert sorted(stored) == ["state.a", "state.c", "state.d"]


def test_what_no_checkpoint_can_hold_is_refused_by_name(tmp_path):
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(ConfigError, match=r"but state\.extra\.1 is a function"):
        folder.write(Position(0, 1), {"extra": [1, lambda: None]})
    with pytest.raises(ConfigError, match="dense tensors"):
        folder.write(Position(0, 1), {"extra": torch.eye(3).to_sparse()})
    assert list(tmp_path.iterdir()) == [], "nothing is left of it"
    assert folder.newest() is None


def test_the_newest_two_are_kept_and_read_in_order(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for moment in (Position(0, 90), Position(0, 100), Position(1, 10)):
        folder.write(moment, {"at": moment.step})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000-000000100", "001-000000010"]
    assert folder.newest() == (Position(1, 10), {"at": 10})


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["a bit", "cut", "gone"])
def test_one_that_is_torn_gives_way_to_the_one_before_and_says_so(tmp_path, caplog, file, damage):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.write(Position(0, step), {"weight": torch.full((100,), float(step)), "at": step})
    path = tmp_path / "000-000000002" / file
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-5])
    else:
        content[-30] ^= 1
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "hydra_tune"):
        moment, state = folder.newest()
    assert moment == Position(0, 1) and state["at"] == 1 and state["weight"].eq(1).all()
    assert "000-000000002 is not sound" in caplog.text


def test_one_that_was_being_written_is_not_there(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.write(Position(0, 1), {"at": 1})
    (tmp_path / "000-000000002.unfinished").mkdir()
    assert folder.newest()[0] == Position(0, 1)
    folder.write(Position(0, 2), {"at": 2})
    assert folder.newest()[0] == Position(0, 2)
