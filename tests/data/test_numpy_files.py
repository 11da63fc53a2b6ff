"""Headers that ask for more than the file has are refused before memory is allocated."""

import io
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from gptlm.data.indexed import open_tokens
from gptlm.errors import GptlmError


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def header(shape, descr="'<i4'", version=1):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text


IDS, LENS, DOCS = npy(np.arange(10, dtype=np.uint16)), npy(np.array([10], np.int32)), npy(np.array([0, 1]))


def write(folder, ids=IDS, lens=LENS, docs=DOCS, compression=zipfile.ZIP_STORED):
    (folder / "c_ids.npy").write_bytes(ids)
    with zipfile.ZipFile(folder / "c_idx.npz", "w", compression) as archive:
        archive.writestr("lens.npy", lens)
        archive.writestr("docs.npy", docs)
    return str(folder / "c")


BAD = {
    "large": header(f"({10**10},)"),
    "huge": header(f"({10**18},)"),
    "overflow": header(f"({2**40}, {2**40})"),
    "negative": header("(-1,)"),
    "long number": header(f"({'9' * 6000},)"),
    "open bracket": header("(((3,)"),
    "nested type": header("(3,)", "[" * 400 + "]" * 400),
    "objects": header("(3,)", "'|O'"),
    "long header": b"\x93NUMPY\x02\x00" + struct.pack("<I", 0xFFFFFFF0) + b" " * 20_000,
    "other version": header("(3,)", version=9),
    "empty": b"",
    "text": b"text that is no array",
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
@pytest.mark.parametrize("part", ["ids", "lens", "docs"])
def test_damaged_headers_are_refused_in_a_sentence(tmp_path, content, part):
    prefix = write(tmp_path, **{part: content})
    name, kind = ("c_ids.npy", "npy") if part == "ids" else ("c_idx.npz", "npz")
    with pytest.raises(GptlmError, match=rf"{name} is not a whole \.{kind} file: .*; preprocess again") as error:
        open_tokens(prefix)
    assert len(str(error.value)) < 300 + len(prefix)


def test_a_header_of_gigabytes_is_not_read(tmp_path):
    prefix = write(tmp_path)
    with open(tmp_path / "c_ids.npy", "wb") as file:  # sparse
        file.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", 0xFFFFFFF0))
        file.truncate(5 << 30)
    tracemalloc.start()
    with pytest.raises(GptlmError, match="its header has 4,294,967,280 bytes"):
        open_tokens(prefix)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_a_member_that_expands_a_thousandfold_is_not_unpacked(tmp_path):
    prefix = write(tmp_path)
    with zipfile.ZipFile(tmp_path / "c_idx.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("lens.npy", "w") as member:
            member.write(header(f"({75 << 20},)"))
            for _ in range(300):
                member.write(bytes(1 << 20))
        archive.writestr("docs.npy", DOCS)
    with pytest.raises(GptlmError, match=r"lens\.npy is 31\d,\d+,\d+ bytes compressed to"):
        open_tokens(prefix)


def test_whole_files_are_read(tmp_path):
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        tokens = open_tokens(write(tmp_path, compression=compression))
        assert tokens.tokens[:].tolist() == list(range(10)) and tokens.sizes.tolist() == [10]
