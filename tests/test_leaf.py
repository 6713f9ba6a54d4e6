"""LEAF's json files: users, merging, checks, text."""

import json
import re

import numpy as np
import pytest
import torch

from fedtail.data import Population, encode_characters
from fedtail.data.leaf import ALPHABET


def write(folder, name: str, data: dict, /, **changes) -> None:
    content = {"users": list(data), "num_samples": [len(y) for _, y in data.values()],
               "user_data": {user: {"x": x, "y": y} for user, (x, y) in data.items()}}
    (folder / name).write_text(json.dumps({**content, **changes}))


def test_users_keep_their_order_and_a_user_in_two_files_is_one_client(tmp_path):
    write(tmp_path, "b.json", {"ann": ([[5.0, 6.0]], [2]), "zoe": ([[7, 8]], [3])})
    write(tmp_path, "a.json", {"zoe": ([[1, 2], [3, 4.5]], [0, 1]), "empty": ([], [])}, hierarchies=[])
    (tmp_path / "README.txt").write_text("not data")
    p = Population.from_leaf(tmp_path)
    assert p.names is not None
    assert (p.names.tolist(), p.size.tolist(), p.targets.tolist()) == (["zoe", "ann"], [3, 1], [0, 1, 3, 2])
    assert isinstance(p.inputs, torch.Tensor)
    assert (p.inputs.tolist(), p.inputs.dtype) == ([[1, 2], [3, 4.5], [7, 8], [5, 6]], torch.float32)
    assert p.mass.tolist() == [3.0, 1.0]


def test_files_are_read_in_the_order_of_their_names(tmp_path):
    for name in "hbfaicgdej":
        write(tmp_path, f"{name}.json", {name: ([[1.0]], [0])})
    p = Population.from_leaf(tmp_path)
    assert p.names is not None
    assert p.names.tolist() == list("abcdefghij")


def test_whole_numbers_stay_whole_and_sequences_are_padded(tmp_path):
    write(tmp_path, "a.json", {"u": ([[1, 2], [3, 4]], [0, 1]), "v": ([[5, 6]], [1])})
    assert isinstance(whole := Population.from_leaf(tmp_path).inputs, torch.Tensor)
    assert (whole.dtype, whole.tolist()) == (torch.int64, [[1, 2], [3, 4], [5, 6]])
    write(tmp_path, "b.json", {"v": ([[7, 8, 9], [1]], [0, 1])})
    ragged = Population.from_leaf(tmp_path)
    assert isinstance(ragged.inputs, dict)
    assert ragged.inputs["lengths"].tolist() == [2, 2, 2, 3, 1]
    assert ragged.client(1)[0]["sequence"].tolist() == [[5, 6, 0], [7, 8, 9], [1, 0, 0]]    # type: ignore[index]


def test_text_is_encoded_by_user(tmp_path):
    text = "To be, or not to be: that is the question [aside]\n" * 2
    windows = [text[i:i + 80] for i in range(len(text) - 80)]
    following = [text[i + 80] for i in range(len(text) - 80)]
    write(tmp_path, "a.json", {"HAMLET": (windows, following), "GHOST": (windows[:3], following[:3])})
    p = Population.from_leaf(tmp_path, encode=encode_characters)
    x, y = p.client(0)
    assert isinstance(x, torch.Tensor)
    assert (x.dtype, y.dtype, tuple(x.shape)) == (torch.int64, torch.int64, (len(windows), 80))
    assert ["".join(ALPHABET[code] for code in row) for row in x.tolist()] == windows
    assert [ALPHABET[code] for code in y.tolist()] == following
    assert p.size.tolist() == [len(windows), 3]


def test_the_alphabet_has_eighty_characters_in_order():
    assert len(set(ALPHABET)) == len(ALPHABET) == 80
    assert list(ALPHABET) == sorted(ALPHABET)
    x, y = encode_characters(list(ALPHABET), list(ALPHABET))
    assert (x[:, 0].tolist(), y.tolist()) == (list(range(80)), list(range(80)))


def test_an_encoder_of_your_own_sees_one_users_lists(tmp_path):
    write(tmp_path, "a.json", {"u": ([["id", "good day"], ["id", "bad"]], [4, 0]), "v": ([["id", "so so"]], [4])})
    p = Population.from_leaf(tmp_path, lambda x, y: ([[len(text)] for _, text in x], np.array(y) // 4))
    assert isinstance(p.inputs, torch.Tensor)
    assert (p.inputs.tolist(), p.targets.tolist()) == ([[8], [3], [5]], [1, 0, 1])


@pytest.mark.parametrize(("users", "changes", "text"), [
    ({"u": (["abc"], ["d"])}, {}, "a.json, user 'u': x is text, numbers are needed. Write encode=encode_characters"),
    ({"u": ([["id", "abc"]], [0])}, {}, "a.json, user 'u': x is text, numbers are needed"),
    ({"u": ([[1]], ["d"])}, {}, "a.json, user 'u': y is text, numbers are needed"),
    ({"u": ([[1]], [0])}, {"num_samples": [2]}, "user 'u': num_samples says 2, but there are 1 x and 1 y"),
    ({"u": ([[1], [2]], [0])}, {}, "user 'u': num_samples says 1, but there are 2 x and 1 y"),
    ({"u": ([[1]], [0])}, {"users": ["u", "w"], "num_samples": [1, 1]}, "lists 2 users, 2 num_samples and 1 entries"),
    ({"u": ([[1]], [0])}, {"num_samples": []}, "lists 1 users, 0 num_samples and 1 entries of user_data"),
    ({"u": ([], [])}, {}, "hold no examples"),
])
def test_errors_name_the_file_and_the_user(tmp_path, users, changes, text):
    write(tmp_path, "a.json", users, **changes)
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        Population.from_leaf(tmp_path)


def test_other_files_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape("there is no .json file in")):
        Population.from_leaf(tmp_path)
    (tmp_path / "settings.json").write_text('{"users": []}')
    with pytest.raises(ValueError, match=re.escape("settings.json lacks num_samples, user_data, so it is not a LEAF")):
        Population.from_leaf(tmp_path)


@pytest.mark.parametrize(("x", "y", "text"), [
    (["naïve €"], ["a"], "'ï€' is not among LEAF's 80 characters"),
    (["abc"], ["~"], "'~' is not among LEAF's 80 characters"),
    (["abc", "ab"], ["a", "b"], "windows must have one length, got 2 to 3 characters"),
    (["abc"], ["ab"], "y must hold one character for each window"),
])
def test_characters_outside_the_alphabet_are_named(x, y, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        encode_characters(x, y)
