"""JSON files of any content: what fits the schema is returned unchanged, anything else is one line."""

import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from aswa_hf._utils.files import read_json, read_object


@dataclass
class Inner:
    score: float | Literal["nan"] | None
    name: str = ""


@dataclass
class Schema:
    count: int
    inner: dict[str, Inner]
    place: str | list[str] = ""


GOOD: dict[str, Any] = {"count": 1, "inner": {"a": {"score": 0.5, "other": [1]}}, "more": {"x": None}}


def change(**fields):
    return json.dumps(GOOD | fields)


BAD = {
    "": "is not a JSON file, or is damaged: Expecting value at line 1, column 1.",
    json.dumps(GOOD)[:-4]: "is not a JSON file, or is damaged: ",
    "[" * 100_000: "is damaged: its lists and objects are nested too deeply.",
    '{"a": ' * 500 + "1" + "}" * 500: "is damaged: Invalid JSON: recursion limit exceeded",
    "[1]": "contains [1], expected an object.",
    '{"count": 1}': "has no 'inner'.",
    change(inner={"a": {}}): "has no 'score' in inner.a.",
    change(count="1"): ": count is '1', expected an integer.",
    change(count=1.0): ": count is 1.0, expected an integer.",
    change(count=True): ": count is True, expected an integer.",
    change(count=None): ": count is None, expected an integer.",
    change(inner=[]): ": inner is [], expected an object.",
    change(inner={"a": {"score": "x" * 100}}): f": inner.a.score is '{'x' * 59}…, expected a number or 'nan'.",
    change(inner={"a": {"score": 1, "name": 2}}): ": inner.a.name is 2, expected a string.",
    change(place=3): ": place is 3, expected a string or a list.",
    change(place=["a", 3]): ": place[1] is 3, expected a string.",
    '{"count": 1' + "0" * 400 + "}": f": the number 1{'0' * 59}… is out of range.",
    '{"count": 1' + "0" * 5000 + "}": f": the number 1{'0' * 59}… is out of range.",
    '{"other": 1e999}': ": 1e999 is not a finite number.",
    '{"other": NaN}': ": NaN is not a finite number.",
    '{"other": "\\ud800"}': "is damaged: Invalid JSON: ",
}


@pytest.mark.parametrize("text", BAD, ids=[message[:40] for message in BAD.values()])
def test_a_file_that_does_not_fit_is_one_line_with_the_file_and_the_field(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="bad") as caught:
        read_json(path, Schema)
    message = str(caught.value)
    assert message.removeprefix(str(path)).lstrip().startswith(BAD[text])
    assert "\n" not in message
    assert len(message) < 250 + len(str(path))


def test_bytes_that_are_not_text_are_counted(tmp_path):
    (tmp_path / "bad.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="byte 8 is not UTF-8 text"):
        read_json(tmp_path / "bad.json")


def test_what_fits_is_returned_with_all_its_fields(tmp_path):
    path = tmp_path / "good.json"
    path.write_text(json.dumps(GOOD), encoding="utf-8")
    assert read_json(path, Schema) == read_object(path) == GOOD
    path.write_text('{"loss": NaN, "limit": -Infinity}', encoding="utf-8")
    assert str(read_object(path)) == "{'loss': nan, 'limit': -inf}"
