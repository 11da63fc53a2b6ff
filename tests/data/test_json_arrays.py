"""JSON arrays in parts: the items of `json.loads`, wherever the chunks of the file end."""

import gzip
import io
import json

import pytest

from gptlm.data import json_arrays
from gptlm.data.documents import read_batches, split_lines
from gptlm.data.json_arrays import BrokenArrayError, array_parts
from gptlm.errors import GptlmError

VALUES = [{"a": "x, ]}"}, 12, [1, [2]], "今天 \u0085]", -3.5e7, None, True, {}, '\\"', [], {"b": {"c": ["é"]}}, 123456]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("layout", [{}, {"indent": 1}, {"separators": (",", ":")}])
@pytest.mark.parametrize("size", [1, 20, 1 << 20])
def test_items_are_those_of_json(monkeypatch, chunk, layout, size):
    monkeypatch.setattr(json_arrays, "CHUNK", chunk)
    for values in (VALUES, [], [1], [12345]):
        text = " \n" + json.dumps(values, ensure_ascii=False, **layout) + " \n"
        content = text.encode()
        found, numbers = [], []
        for part in array_parts(io.BytesIO(content), "x", size):
            items = json.loads(b"[" + part.content + b"]")
            assert content[part.start : part.start + len(part.content)] == part.content
            assert len(items) == part.items
            numbers += range(part.number, part.number + part.items)
            found += items
        assert found == values and numbers == list(range(1, len(values) + 1))


@pytest.mark.parametrize("text", ["[1, 2", "[1 2]", "[1,, 2]", "[1, 2] 3", '["a]', "[1, nul]", "[,]", "{}", "", "[1,]"])
def test_what_is_no_array(text):
    with pytest.raises((ValueError, KeyError)):
        json.loads(text)[0]
    with pytest.raises(BrokenArrayError):
        list(array_parts(io.BytesIO(text.encode()), "x", 1))


def test_a_broken_array_is_named_with_line_and_column(tmp_path):
    (tmp_path / "a.json").write_text('[{"a": 1},\n {"a": 2}\n {"a": 3}]')
    with pytest.raises(GptlmError, match="a.json: broken JSON array: Expecting ',' delimiter: line 3 column 2"):
        list(read_batches([tmp_path / "a.json"]))
    (tmp_path / "deep.json").write_text("[1,\n" + "[" * 100_000)
    with pytest.raises(GptlmError, match="deep.json, line 2: the JSON is nested too deeply"):
        list(read_batches([tmp_path / "deep.json"]))


@pytest.mark.parametrize("packed", [False, True])
def test_a_large_array_is_read_in_parts(tmp_path, packed):
    """Of a plain file they are ranges of bytes, which worker processes read."""
    records = [{"text": f"{i} é " + "x" * 500} for i in range(3000)]
    content = b"\xef\xbb\xbf" + json.dumps(records, ensure_ascii=False).encode()
    path = tmp_path / ("a.json.gz" if packed else "a.json")
    path.write_bytes(gzip.compress(content) if packed else content)
    batches = list(read_batches([path]))
    assert len(batches) > 4 and all(isinstance(batch.records, bytes if packed else tuple) for batch in batches)
    whole = [split_lines(batch) for batch in batches]
    assert [record for batch in whole for record in batch.records] == records
    assert [number for batch in whole for number in batch.numbers] == list(range(1, 3001))
    assert packed or sum(batch.read for batch in batches) == pytest.approx(len(content), abs=8)
