"""Mutations of files: values of JSON and YAML, headers, numbers, pickles, text, bytes, and what lies at the path."""

import datetime
import decimal
import gzip
import io
import json
import os
import pickle
import pickletools
import random
import shutil
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
import zstandard

NUMBERS = [0, 1, -1, 63, 255, 2**15, 2**31 - 1, -(2**31), 2**32 - 1, 2**40, 2**62, 2**63 - 1, -(2**63)]
PARTS = [  # instructions that have broken readers of pickles, or could
    b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8I00\nI01\ntR",
    b"cnumpy\ndtype\n(X\x02\x00\x00\x00f4I00\nI01\ntR(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\x7fK\x08K?tb",
    b"cnumpy\nndarray\n",
    b"cnumpy.core.multiarray\nscalar\n",
    b"cnumpy.core.numeric\n_frombuffer\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch\nFloatStorage\n",
    b"ctorch.storage\nUntypedStorage\n",
    b"cargparse\nNamespace\n)R",
    b"ccollections\nOrderedDict\n)R",
    b"ccopyreg\n_reconstructor\n",
    b"cbuiltins\ngetattr\n",
    *(bytes([code]) for code in b"RboOiQP0122345]}l)(tds.ueajhgrqp\x81\x92\x85\x86\x87\x88\x89\x8f\x90\x91\x94N"),
]
JSON_VALUES = [
    "null", "true", "0", "-1", "1", "2", "1.5", "NaN", "Infinity", "1e999", "-1e-999", str(2**31), str(2**63),
    str(-(2**63)), "1" + "0" * 400, "1" + "0" * 5000, '""', '"a"', '"1"', '"\\ud800"', '"\\u0000"', '"é花"',
    '"' + "a" * 300 + '"', '"' + "a" * 70000 + '"', "[]", "{}", "[null]", "[[1, 2], 3]", "[1, \"a\", {}]",
    '{"a": {"b": []}}', '{"": null}', "[" * 3000 + "]" * 3000, "[" * 100000 + "]" * 100000,
    '{"a":' * 2000 + "1" + "}" * 2000, '"../../x"', '"/dev/zero"', '"/"', '"."', "0.1", '"nan"', '"{{ x }}"',
    '"{% for %}"', '"%s{0}"', '"\\n\\r"',
]  # fmt: skip
YAML_VALUES = [
    *[text for text in JSON_VALUES if len(text) < 10000], "~", ".nan", "-.inf", "0o17", "0x1F", "1_000",
    "2026-01-02", "2026-99-99", "2026-01-02 03:04:05", "!!python/object/apply:os.getcwd []", "!!binary aGk=",
    "!!set {a, b}", "!!int x", "&a [*a]", "*b", "{*a : 1}", "<<", "? x", "|\n  text", "'", "yes", "1:30:00",
    "!!float 'x'", "- - -", "\t1", "@x", "[1, [2, [3]]]", "!!omap [a: 1]", "!x y",
]  # fmt: skip
TEXTS = [
    b"", b"\xff\xfe", b"\xef\xbb\xbf", b"\x00", b"\xff", b"\xed\xa0\x80", b"\r", b"\r\n\r\n", "\u2028".encode(),
    "\u0085".encode(), b"a" * 100_000, b"{", b"}", b"[", b'"', b"null", b"1", b"[1]", b'{"text": 1}', b"{}", b"\n",
    b",", b"<|endoftext|>", b"#version: 0.2\n", b"\x1f\x8b\x08", b"{% for x in range(10**9) %}", b"{{ 1/0 }}",
    b"{{ messages.x.y }}", b"{% endif %}", b"9" * 5000, b"-1", b"../x", b"%", b"\t",
]  # fmt: skip
NPY_HEADERS = [
    "{'descr': '|O', 'fortran_order': False, 'shape': (4,), }",
    "{'descr': '<u2', 'fortran_order': True, 'shape': (4, 1), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (), }",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (4611686018427387904,), }",
    "{'descr': '<U7', 'fortran_order': False, 'shape': (2,), }",
    "{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (2,), }", "{'descr': '<u2', 'shape': (2,), }", "{}",
    "[", "1", "", "{'descr': '>i8', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '<M8[s]', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '<u2', 'fortran_order': 1, 'shape': (3.0,), }",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (2**70,), }", "(" * 500,
    "{'descr': '<u2', 'fortran_order': False, 'shape': (0,), }",
]  # fmt: skip
PLACES = ("gone", "folder", "loop", "dangling", "fifo", "socket", "null", "empty", "unreadable", "full-folder")
MARK = "@@HERE@@"


@dataclass(frozen=True)
class Edit:
    """One mutation of one file.

    Attributes:
        file: relative to the folder of the case.
        how: a key of `MUTATIONS`, or "place".
        at: where in the file; taken modulo the number of places.
        what: which value, or the seed; taken modulo the number of values.
    """

    file: str
    how: str
    at: int
    what: int

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        if self.how == "place":
            _move(path, PLACES[self.what % len(PLACES)])
        elif path.is_file():  # an earlier edit may have replaced it
            data = path.read_bytes()
            try:
                data = MUTATIONS[self.how](data, self.at, self.what)
            except Exception:  # an earlier edit has damaged it
                data = _bytes(data, self.at, self.what)
            path.write_bytes(data)


def ways_of(file: str) -> list[str]:
    """Mutations for a file, by its name; those of its format several times."""
    for endings, ways in WAYS.items():
        if file.endswith(endings):
            return [*ways, *ways, *ways, "bytes", "text", "place"]
    return ["bytes", "number", "place"]


# Trees ------------------------------------------------------------------------------------------------------------


def _nodes(tree: Any, depth: int = 100) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value down to `depth`."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(pairs) if depth else ():
        yield tree, key
        yield from _nodes(value, depth - 1)


def _mutate_tree(tree: Any, at: int, what: int, values: list[str], dump: Callable[[Any], str]) -> str:
    """`tree` as text with one value replaced, removed, renamed or doubled."""
    nodes = list(_nodes(tree, at % 3 or 100))  # the values near the root are few, such as the parts of a tokenizer
    at //= 3
    choice = what % (len(values) + 5) - 5
    if not nodes or at % 23 == 22:
        return values[max(choice, 0)]
    container, key = nodes[at % len(nodes)]
    if choice >= 0:
        container[key] = MARK
    elif choice == -1:
        del container[key]
    elif isinstance(container, list):
        container.insert(key, container[key])
    elif choice == -2:
        container[MARK] = container.pop(key)
        return dump(tree).replace(MARK, str(key) + "_x")
    elif choice == -3:
        container[MARK] = container[key]
        return dump(tree).replace(MARK, str(key))  # the key twice
    elif choice == -4:
        container["\x7f" * 3] = [container[key]] * 2
    else:
        container[key] = [container[key]] if at % 2 else {str(key): container[key]}
    text = dump(tree)
    for quoted in (f'"{MARK}"', f"'{MARK}'", MARK):
        text = text.replace(quoted, values[max(choice, 0)], 1)
    return text


def _json(data: bytes, at: int, what: int) -> bytes:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):  # of an earlier edit
        return _text(data, at, what)
    return _mutate_tree(tree, at, what, JSON_VALUES, json.dumps).encode()


def _yaml(data: bytes, at: int, what: int) -> bytes:
    try:
        tree = yaml.safe_load(data)
        return _mutate_tree(tree, at, what, YAML_VALUES, lambda tree: yaml.safe_dump(tree, sort_keys=False)).encode()
    except (ValueError, yaml.YAMLError, RecursionError):
        return _text(data, at, what)


def _lines(data: bytes, at: int, what: int) -> bytes:
    """One line of JSON lines."""
    lines = data.splitlines(keepends=True) or [b"{}\n"]
    place = at % len(lines)
    lines[place] = _json(lines[place], at // len(lines), what) + b"\n"
    return b"".join(lines)


# Binary formats ---------------------------------------------------------------------------------------------------


def _safetensors(data: bytes, at: int, what: int) -> bytes:
    """The JSON header, with its length."""
    if len(data) < 8:
        return data
    size = struct.unpack("<Q", data[:8])[0]
    header = _json(data[8 : 8 + size], at, what)
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def _number(data: bytes, at: int, what: int) -> bytes:
    """A little-endian number near the beginning or anywhere."""
    width = (1, 2, 4, 8)[what % 4]
    place = at // 2 % min(len(data) or 1, 96 if at % 2 else len(data) or 1)
    number = NUMBERS[what // 4 % len(NUMBERS)] % (1 << 8 * width)
    return data[:place] + number.to_bytes(width, "little") + data[place + width :]


def _npy(data: bytes, at: int, what: int) -> bytes:
    """The header of a .npy file."""
    text = NPY_HEADERS[what % len(NPY_HEADERS)].encode() + b"\n"
    old = struct.unpack("<H", data[8:10])[0] if len(data) > 10 else 0
    return data[:8] + struct.pack("<H", len(text)) + text + data[10 + old :]


def _compressed(data: bytes, at: int, what: int) -> bytes:
    """What is in a .gz or .zst file."""
    try:
        if data.startswith(b"\x1f\x8b"):
            return gzip.compress(_lines(gzip.decompress(data), at, what))
        return zstandard.compress(_text(zstandard.decompress(data), at, what))
    except (OSError, EOFError, zlib.error, zstandard.ZstdError):  # of an earlier edit
        return _bytes(data, at, what)


def _parquet(data: bytes, at: int, what: int) -> bytes:
    """A column of another type, or without a value."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(data))
    except (OSError, pa.ArrowException):  # of an earlier edit
        return _bytes(data, at, what)
    rows, place = table.num_rows, at % max(1, table.num_columns)
    columns = [
        pa.nulls(rows),
        pa.array([1] * rows),
        pa.array([1.5] * rows),
        pa.array([b"\xff"] * rows),
        pa.array([None, *["a"] * (rows - 1)]),
        pa.array([["a"]] * rows),
        pa.array([{"a": 1}] * rows),
        pa.array([datetime.date(2026, 1, 2)] * rows),
        pa.array([""] * rows),
        pa.array(["\0"] * rows),
        pa.array(["a" * 50_000] * rows),
        pa.array(["a"] * rows).dictionary_encode(),
        pa.array([True] * rows),
        pa.array([decimal.Decimal(1)] * rows),
        pa.array(["a"] * rows, pa.large_string()),
        pa.array([[]] * rows, pa.list_(pa.null())),
    ]
    column = columns[what % len(columns)]
    file = io.BytesIO()
    name = table.column_names[place]
    match at // 7 % 5:
        case 0:
            table = table.slice(0, 0)
        case 1:
            table = table.append_column(name, column)  # the name twice
        case 2:
            table = table.drop_columns([name])
        case _:
            table = table.set_column(place, name, column)
    pq.write_table(table, file)
    return file.getvalue()


def _in_zip(member: Callable[[bytes, int, int], bytes]) -> Callable[[bytes, int, int], bytes]:
    """A mutation of one entry of a zip."""

    def mutate(data: bytes, at: int, what: int) -> bytes:
        file = io.BytesIO()
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(file, "w") as after:
                names = before.namelist()
                chosen = names[at % len(names)]
                for name in names:
                    part = before.read(name)
                    if name == chosen and what % 17 == 16:
                        continue
                    after.writestr(name, member(part, at // len(names), what) if name == chosen else part)
        except (zipfile.BadZipFile, IndexError):
            return _bytes(data, at, what)
        return file.getvalue()

    return mutate


def _pickle(data: bytes, at: int, what: int) -> bytes:
    """A pickle, or torch's zip of one."""
    chance = random.Random(f"{at} {what}")
    return (mutated_zip if zipfile.is_zipfile(io.BytesIO(data)) else mutated)(data, chance)


def places(data: bytes) -> list[int]:
    """Positions of the instructions of the pickles in `data`."""
    found = []
    file = io.BytesIO(data)
    try:
        while True:
            found += [position for _, _, position in pickletools.genops(file)]
    except Exception:  # the end, or what follows the pickles
        return found or [0]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """A few changes: of single bytes, of instructions, of numbers, of lengths."""
    made, starts = bytearray(data), places(data)
    if chance.random() < 0.3:  # only arguments of instructions: sizes, lengths, places
        for _ in range(chance.randrange(1, 3)):
            at = chance.choice(starts) + 1
            made[at : at + 1] = bytes([chance.choice((0, 1, 2, 3, 4, 6, 24, 127, 128, 255))])
        return bytes(made)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.choice((chance.choice(starts), chance.randrange(len(made) or 1)))
        match chance.randrange(8):
            case 0:
                made[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                made[at : at + 1] = bytes([made[at] ^ 1 << chance.randrange(8)]) if at < len(made) else b""
            case 2:
                made[at:at] = chance.choice(PARTS)
            case 3:
                made[at : at + 1] = chance.choice(PARTS)
            case 4:
                number = chance.choice(NUMBERS)
                made[at:at] = pickle.dumps(number, protocol=2)[2:-1]
            case 5:
                value = chance.choice(NUMBERS) & 0xFFFFFFFF
                made[at + 1 : at + 5] = struct.pack("<I", value)
            case 6:
                other, length = chance.choice(starts), chance.randrange(1, 60)
                made[at:at] = data[other : other + length]
            case 7:
                del made[at : at + chance.randrange(1, 20)]
    return bytes(made)


def mutated_zip(data: bytes, chance: random.Random) -> bytes:
    """Mostly the pickle in it is changed, else the zip."""
    if chance.random() < 0.2:
        return mutated(data, chance)
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(file, "w") as after:
        for entry in before.namelist():
            part = before.read(entry)
            if entry.endswith("data.pkl"):
                part = mutated(part, chance)
            elif "/data/" in entry and chance.random() < 0.1:
                part = part[: chance.randrange(len(part) + 1)]
            after.writestr(entry, part)
    return file.getvalue()


# Text, bytes, places ----------------------------------------------------------------------------------------------


def _text(data: bytes, at: int, what: int) -> bytes:
    """Text at the beginning of a line or anywhere, or in another encoding."""
    choice = what % (len(TEXTS) + 3)
    if choice >= len(TEXTS):
        text = data.decode(errors="replace")
        return text.encode(("utf-16", "latin-1", "utf-8-sig")[choice - len(TEXTS)], errors="replace")
    starts = [0, *(place + 1 for place, byte in enumerate(data) if byte == 10)]
    place = starts[at // 2 % len(starts)] if at % 2 else at // 2 % (len(data) + 1)
    return data[:place] + TEXTS[choice] + data[place:]


def _bytes(data: bytes, at: int, what: int) -> bytes:
    place, size = at % (len(data) + 1), 1 + what // 8 % 40
    match what % 8:
        case 0:
            return data[:place]
        case 1:
            return data[:place] + bytes(byte ^ 1 << what % 7 for byte in data[place : place + 1]) + data[place + 1 :]
        case 2:
            return data[:place] + bytes(size) + data[place + size :]
        case 3:
            return data[:place] + b"\xff" * size + data[place:]
        case 4:
            return data[:place] + data[place + size :]
        case 5:
            return data + data
        case 6:
            return data[:place] + data[:size] + data[place:]
        case _:
            return b"" if what // 8 % 2 else data[place:]


def _move(path: Path, place: str) -> None:
    """Put something else there."""
    if not os.path.lexists(path):
        return
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    match place:
        case "folder":
            path.mkdir()
        case "full-folder":
            path.mkdir()
            (path / "a.json").write_text("{}")
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("not/there")
        case "fifo":
            os.mkfifo(path)
        case "socket":
            here = os.getcwd()
            os.chdir(path.parent)  # the path of a socket may have 108 characters
            try:
                with socket.socket(socket.AF_UNIX) as end:
                    end.bind(path.name)
            finally:
                os.chdir(here)
        case "null":
            path.symlink_to(os.devnull)
        case "empty":
            path.write_bytes(b"")
        case "unreadable":  # root reads it all the same
            path.write_bytes(b"x")
            path.chmod(0)


MUTATIONS: dict[str, Callable[[bytes, int, int], bytes]] = {
    "json": _json,
    "yaml": _yaml,
    "lines": _lines,
    "safetensors": _safetensors,
    "number": _number,
    "npy": _npy,
    "zip-npy": _in_zip(_npy),
    "zip-number": _in_zip(_number),
    "zip-bytes": _in_zip(_bytes),
    "compressed": _compressed,
    "parquet": _parquet,
    "pickle": _pickle,
    "zip-pickle": _in_zip(_pickle),
    "text": _text,
    "bytes": _bytes,
}
WAYS = {
    (".jsonl",): ("lines",),
    (".json",): ("json",),
    (".yaml",): ("yaml",),
    (".txt", ".jinja", ".md", ".py", ".http"): ("text",),
    (".safetensors",): ("safetensors", "number"),
    ("pytorch_model.bin", ".pt", ".pdparams"): ("pickle",),
    (".idx", ".bin"): ("number",),
    (".npy",): ("npy", "number"),
    (".npz",): ("zip-npy", "zip-number"),
    (".gz", ".zst"): ("compressed",),
    (".parquet",): ("parquet",),
    (".zip",): ("zip-pickle", "zip-bytes"),
}
