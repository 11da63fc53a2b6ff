"""JSON that Python cannot read ends in one kind of error, everywhere."""

import json
import re
from pathlib import Path

import pytest

from gptlm.data.documents import read_texts
from gptlm.data.text_files import parse_line
from gptlm.errors import GptlmError, reason_of
from gptlm.json_text import parse_json
from gptlm.model.files import read_json
from gptlm.model.safetensors_io import read_header

SOURCE = Path(__file__).parents[1] / "src" / "gptlm"
DEEP, LONG = "[" * 100_000 + "]" * 100_000, "9" * 5000


def test_what_cannot_be_read_is_a_value_error_with_a_reason():
    with pytest.raises(ValueError, match="^too deeply nested$"):
        parse_json(DEEP)
    with pytest.raises(ValueError, match="^a number has thousands of digits$"):
        parse_json(f'{{"a": [{LONG}]}}')
    with pytest.raises(json.JSONDecodeError, match="line 2 column 1"):
        parse_json("[\n")
    with pytest.raises(UnicodeDecodeError):
        parse_json(b'"\xff"')
    assert parse_json(' {"a": [1, 2.5, null]} ') == {"a": [1, 2.5, None]}
    assert parse_json("9" * 4300) == int("9" * 4300)


@pytest.mark.parametrize(("value", "says"), [(DEEP, "nested"), (LONG, "thousands of digits")], ids=["deep", "long"])
def test_files_with_such_json_are_named(tmp_path, value, says):
    path = tmp_path / "a.json"
    path.write_text(f'{{"a": {value}}}')
    with pytest.raises(GptlmError, match=rf"a\.json is damaged: .*{says}"):
        read_json(path)
    with pytest.raises(GptlmError, match=says):
        parse_line(f'{{"a": {value}}}')
    for name, content in (("b.jsonl", '{"text": "x"}\n{"text": %s}'), ("b.json", '[{"text": "x"}, {"text": %s}]')):
        (tmp_path / name).write_text(content % value)
        with pytest.raises(GptlmError, match=rf"{re.escape(name)}.*({says}|broken)"):
            list(read_texts(str(tmp_path / name)))
    header = f'{{"a": {value}}}'.encode()
    (tmp_path / "c.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    with pytest.raises(GptlmError, match=r"c\.safetensors is damaged"):
        read_header(tmp_path / "c.safetensors")


def test_reasons_of_libraries_do_not_advise_to_change_the_interpreter():
    with pytest.raises(ValueError, match="set_int_max_str_digits") as error:
        json.loads(LONG)
    assert reason_of(error.value) == "a number has thousands of digits"


def test_no_other_module_parses_files_with_json():
    """Own values that are written and read again, also by another process, cannot be too deep."""
    parsing = re.compile(r"json\.loads?\((?!json\.dumps)")
    allowed = {"json_text.py", "recipes/demo.py", "model/tokenizer.py", "recipes/predict.py"}
    allowed |= {f"recipes/common/{name}.py" for name in ("main_process_first", "restart")}
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if parsing.search(path.read_text())}
    assert found <= allowed
