"""Token files: bytes on disk, what is read back, and what is refused."""

import json
import logging
import struct
from hashlib import sha256

import numpy as np
import pytest
import xxhash

from gptlm.data.corpora import find_prefixes, parse_input
from gptlm.data.indexed import content_fingerprint, dtype_for, first_bad_token, id_range, open_tokens, read_metadata
from gptlm.data.writer import IndexedTokensWriter
from gptlm.errors import GptlmError
from tests.golden import recorded


def write(prefix, documents, vocab_size=100, layout="mmap"):
    writer = IndexedTokensWriter(str(prefix), vocab_size, layout)
    for document in documents:
        writer.add(np.array(document, np.int32), [len(document)])
    return writer.finish({"tokenizer": "t"})


def test_mmap_bytes_by_hand(tmp_path):
    """Magic, version 1, dtype code 8, 2 sequences, 3 document entries, sizes, byte pointers, documents."""
    write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<5H", 1, 2, 3, 4, 5)
    assert (tmp_path / "a.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 2, 3)
        + struct.pack("<2i", 3, 2)
        + struct.pack("<2q", 0, 6)
        + struct.pack("<3q", 0, 1, 2)
    )


def test_npy_is_what_numpy_reads(tmp_path):
    write(tmp_path / "a", [[1, 2, 3], [4, 5]], layout="npy")
    assert np.load(tmp_path / "a_ids.npy").tolist() == [1, 2, 3, 4, 5]
    index = np.load(tmp_path / "a_idx.npz")
    assert (index["lens"].tolist(), index["lens"].dtype) == ([3, 2], np.int32)
    assert (index["docs"].tolist(), index["docs"].dtype) == ([0, 1, 2], np.int64)


@pytest.mark.parametrize("layout", ["mmap", "npy", "lazy", "cached"])
def test_documents_come_back(tmp_path, layout):
    write(tmp_path / "a", [[7], [1, 2, 3], [9, 9]], layout=layout)
    tokens = open_tokens(str(tmp_path / "a"))
    assert [tokens.get(i).tolist() for i in range(len(tokens))] == [[7], [1, 2, 3], [9, 9]]
    assert tokens.get(1, 1).tolist() == [2, 3] and tokens.get(1, 1, 1).tolist() == [2]
    assert tokens.document_starts.tolist() == [0, 1, 2, 3]
    assert id_range(tokens.tokens) == (0, 9)


@pytest.mark.parametrize(
    ("entries", "dtype"), [(65499, "uint16"), (65500, "int32"), (65537, "int32"), (70000, "int32")]
)
def test_dtype_edges(tmp_path, entries, dtype):
    assert dtype_for(entries) == np.dtype(dtype)
    write(tmp_path / "a", [[entries - 1]], vocab_size=entries)
    assert open_tokens(str(tmp_path / "a")).get(0).tolist() == [entries - 1]


@pytest.mark.parametrize("bad", [-1, 100, 65536])
def test_an_id_outside_the_vocabulary_is_never_stored(tmp_path, bad):
    writer = IndexedTokensWriter(str(tmp_path / "a"), 100)
    with pytest.raises(GptlmError, match=str(bad)):
        writer.add(np.array([1, bad]), [2])
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_nothing_has_its_final_name_before_finish(tmp_path):
    writer = IndexedTokensWriter(str(tmp_path / "a"), 100)
    writer.add(np.array([1]), [1])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".gptlm-files", "a.bin.incomplete"]
    with pytest.raises(GptlmError, match="does not exist"):
        open_tokens(str(tmp_path / "a"))
    writer.abandon()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["[]", "null", '"text"', '[["tokens", 3]]'])
def test_metadata_that_is_no_object_is_refused(tmp_path, content):
    write(tmp_path / "a", [[1, 2], [50]])
    (tmp_path / "a.meta.json").write_text(content)
    with pytest.raises(GptlmError, match=r"a.meta.json is damaged \(it holds no JSON object\); remove it or"):
        read_metadata(str(tmp_path / "a"))


def test_metadata_names_tokenizer_and_counts(tmp_path):
    write(tmp_path / "a", [[1, 2], [50]])
    facts = json.loads((tmp_path / "a.meta.json").read_text())
    assert facts == {
        "tokenizer": "t", "vocab_size": 100, "dtype": "uint16", "documents": 2, "tokens": 3, "max_id": 50,
        "xxh3_128": xxhash.xxh3_128_hexdigest(struct.pack("<3H", 1, 2, 50)),
    }  # fmt: skip


def damage_truncated_bin(p):
    p("a.bin").write_bytes(p("a.bin").read_bytes()[:-2])


def damage_truncated_idx(p):
    p("a.idx").write_bytes(p("a.idx").read_bytes()[:-8])


def damage_empty_idx(p):
    p("a.idx").write_bytes(b"")


def damage_foreign_magic(p):
    p("a.idx").write_bytes(b"XXTIDX\x00\x00" + bytes(100))


def damage_swapped_names(p):
    content = p("a.bin").read_bytes()
    p("a.bin").write_bytes(p("a.idx").read_bytes())
    p("a.idx").write_bytes(content + bytes(100))


def damage_other_pair(p):
    write(p("b"), [[1, 2, 3, 4]])
    p("a.idx").write_bytes(p("b.idx").read_bytes())


def damage_version(p):
    content = bytearray(p("a.idx").read_bytes())
    content[9] = 2
    p("a.idx").write_bytes(bytes(content))


def damage_dtype_code(p):
    content = bytearray(p("a.idx").read_bytes())
    content[17] = 6
    p("a.idx").write_bytes(bytes(content))


def damage_pointers(p):
    content = bytearray(p("a.idx").read_bytes())
    content[34 + 8 + 8] += 2
    p("a.idx").write_bytes(bytes(content))


def damage_missing_bin(p):
    p("a.bin").unlink()


@pytest.mark.parametrize(
    ("damage", "names", "says"),
    [
        (damage_truncated_bin, "a.bin", "8 bytes long.*describes 10"),
        (damage_truncated_idx, "a.idx", "74 bytes long.*announces 82"),
        (damage_empty_idx, "a.idx", "0 bytes"),
        (damage_foreign_magic, "a.idx", "XXTIDX"),
        (damage_swapped_names, "a.idx", "swapped"),
        (damage_other_pair, "a.bin", "10 bytes long.*describes 8"),
        (damage_version, "a.idx", "version 2"),
        (damage_dtype_code, "a.idx", "code 6"),
        (damage_pointers, "a.idx", "pointers"),
        (damage_missing_bin, "a.bin", "does not exist"),
    ],
)
def test_damaged_mmap_pairs_are_named(tmp_path, damage, names, says):
    write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    damage(lambda name: tmp_path / name)
    with pytest.raises(GptlmError, match=f"(?s){names}.*{says}"):
        open_tokens(str(tmp_path / "a"))


def test_damaged_npy_pairs_are_named(tmp_path):
    write(tmp_path / "a", [[1, 2, 3], [4, 5]], layout="npy")
    ids, index = tmp_path / "a_ids.npy", tmp_path / "a_idx.npz"
    good_ids, good_index = ids.read_bytes(), index.read_bytes()

    def refused(says):
        with pytest.raises(GptlmError, match=says):
            open_tokens(str(tmp_path / "a"))

    ids.write_bytes(good_ids[:-4])
    refused("a_ids.npy")
    ids.write_bytes(good_ids)
    index.write_bytes(good_index[:40])
    refused("a_idx.npz")
    np.savez(index, lens=np.array([3, 3], np.int32), docs=np.arange(3))
    refused("contains 5 tokens.*describes 6")
    np.savez(index, lens=np.array([3, 2], np.int64), docs=np.arange(3))
    refused("int64.*int32")
    np.savez(index, lens=np.array([3, 2], np.int32))
    refused("lacks an array.*docs")
    np.savez(index, lens=np.array([3, 2], np.int32), docs=np.array([None, "x"], object))
    refused("a_idx.npz")
    index.write_bytes(b"text")
    refused("a_idx.npz")
    ids.write_bytes(b"")
    refused("a_ids.npy")
    ids.write_bytes(good_index)
    index.write_bytes(good_ids)
    refused("a_ids.npy.*npz file")
    ids.write_bytes(good_ids)
    refused("a_idx.npz.*npy file")
    index.unlink()
    refused("a_idx.npz does not exist")
    index.write_bytes(good_index)
    ids.unlink()
    refused("a_ids.npy does not exist")


@pytest.mark.parametrize("layout", ["mmap", "lazy", "npy"])
@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ([0, 1, 2, 3], "ends at 3, the file has 4 sequences .3 documents are listed."),
        ([1, 2, 3, 4], "starts at 1, not at 0"),
        ([0, 3, 1, 4], "decreases: document 2 starts before the one before it .at sequence 1 after 3."),
        ([0, 1, 2, 3, 4, 5], "ends at 5"),
        ([0, 4, 0, 4], "decreases"),
        ([], "is empty"),
    ],
)
def test_a_wrong_document_index_is_refused_by_every_reader(tmp_path, layout, documents, says):
    write(tmp_path / "a", [[1, 2], [3], [4], [5, 6]], layout=layout)
    index = tmp_path / ("a_idx.npz" if layout == "npy" else "a.idx")
    entries = np.array(documents, np.int64)
    if layout == "npy":
        np.savez(index, lens=np.array([2, 1, 1, 2], np.int32), docs=entries)
    else:  # the count of entries lies at byte 26 or 48, the entries at the end
        content, at = index.read_bytes()[: -8 * 5], 26 if layout == "mmap" else 48
        index.write_bytes(content[:at] + struct.pack("<Q", len(entries)) + content[at + 8 :] + entries.tobytes())
    with pytest.raises(GptlmError, match=f"{index.name}: the document index {says}"):
        open_tokens(str(tmp_path / "a"))


def test_documents_without_tokens_are_read_and_named(tmp_path, caplog, monkeypatch):
    """megatron-core's tool repeats an entry for an empty text; its own files must stay readable."""
    monkeypatch.setattr(logging.getLogger("gptlm"), "propagate", True)
    write(tmp_path / "a", [[1, 2], [3]], layout="npy")
    np.savez(tmp_path / "a_idx.npz", lens=np.array([2, 1], np.int32), docs=np.array([0, 1, 1, 2]))
    assert open_tokens(str(tmp_path / "a")).document_starts.tolist() == [0, 1, 1, 2]
    assert "repeats 1 times (first at entry 2, value 1): these are documents without tokens" in caplog.text
    caplog.clear()
    golden = recorded("megatron/preprocess.json")
    documents = [[*ids, 50256] for ids in golden["documents"] if ids]
    writer = IndexedTokensWriter(str(tmp_path / "b"), 50257)
    writer.add(
        np.concatenate(documents), list(map(len, documents)), np.array([bool(ids) for ids in golden["documents"]])
    )
    writer.finish({})
    content = {name: (tmp_path / f"b.{name}").read_bytes() for name in ("bin", "idx")}
    assert {name: sha256(data).hexdigest() for name, data in content.items()} == golden["files"]["new_eod"]
    assert len(open_tokens(str(tmp_path / "b")).document_starts) == 71 and "documents without tokens" in caplog.text


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_every_integer_dtype_code_is_read(tmp_path, code, dtype):
    (tmp_path / "a.bin").write_bytes(np.array([1, 2, 3], dtype).tobytes())
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 1, 2) + struct.pack("<iqqq", 3, 0, 0, 1)
    (tmp_path / "a.idx").write_bytes(index)
    assert open_tokens(str(tmp_path / "a")).get(0).astype(np.int64).tolist() == [1, 2, 3]


def test_tntidx_bytes_by_hand(tmp_path):
    """56 bytes of header, then dimension offsets, data offsets in elements, sizes, documents, all int64."""
    write(tmp_path / "a", [[1, 2, 3], [4, 5]], layout="lazy")
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<5i", 1, 2, 3, 4, 5)
    numbers = (1, 4, 4, 2, 2, 3, *(0, 1, 2), *(0, 3, 5), *(3, 2), *(0, 1, 2))
    assert (tmp_path / "a.idx").read_bytes() == b"TNTIDX\x00\x00" + struct.pack(f"<{len(numbers)}q", *numbers)


def test_damaged_tntidx_is_named(tmp_path):
    write(tmp_path / "a", [[1, 2, 3], [4, 5]], layout="lazy")
    good = (tmp_path / "a.idx").read_bytes()
    changed = bytearray(good)
    changed[56 + 24 + 8] = 2  # the second data offset
    for content, says in ((good[:-8], "announces 144"), (good[:20], "at least 56"), (bytes(changed), "running sum")):
        (tmp_path / "a.idx").write_bytes(content)
        with pytest.raises(GptlmError, match=f"a.idx.*{says}"):
            open_tokens(str(tmp_path / "a"))


def test_several_formats_under_one_prefix_are_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("gptlm"), "propagate", True)  # a run before may have sent it elsewhere
    write(tmp_path / "a", [[1]])
    write(tmp_path / "a", [[2]], layout="npy")
    assert open_tokens(str(tmp_path / "a")).get(0).tolist() == [2]
    assert "several formats (_ids.npy, .bin): _ids.npy is read" in caplog.text


def test_the_old_single_npz_is_read(tmp_path):
    np.savez(tmp_path / "a_ids.npz", ids=np.array([1, 2, 3, 4], np.uint16), lens=np.array([1, 3]))
    (prefix,) = find_prefixes(str(tmp_path))
    tokens = open_tokens(prefix)
    assert [tokens.get(i).tolist() for i in range(2)] == [[1], [2, 3, 4]] and tokens.sizes.dtype == np.int32
    np.savez(tmp_path / "a_ids.npz", ids=np.array([1, 2, 3, 4], np.uint16), lens=np.array([1, 4]))
    with pytest.raises(GptlmError, match="contains 4 tokens.*describes 5"):
        open_tokens(prefix)
    np.savez(tmp_path / "a_ids.npz", ids=np.array([1]))
    with pytest.raises(GptlmError, match="'ids' and 'lens'"):
        open_tokens(prefix)


def test_offsets_beyond_2_gib_are_read_from_the_right_place(tmp_path):
    """Three sequences of 1.2e9 int16 tokens in a sparse file; real values at the very end only."""
    length = 1_200_000_000
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(3 * length * 2)
        file.seek(3 * length * 2 - 6)
        file.write(np.array([11, 12, 13], "<i2").tobytes())
    pointers = [0, length * 2, length * 4]
    (tmp_path / "a.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 3, 3, 4)
        + struct.pack("<3i", *[length] * 3)
        + struct.pack("<3q", *pointers)
        + struct.pack("<4q", 0, 1, 2, 3)
    )
    tokens = open_tokens(str(tmp_path / "a"))
    assert tokens.starts.tolist() == [0, length, 2 * length]
    assert tokens.get(2, length - 3).tolist() == [11, 12, 13]


def test_first_bad_token_is_found(tmp_path):
    write(tmp_path / "a", [[1, 2, 3], [4, 50, 60]])
    tokens = open_tokens(str(tmp_path / "a"))
    assert first_bad_token(tokens, 50) == (1, 1, 50)
    assert first_bad_token(tokens, 61) is None


def test_input_dir_forms(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / name, [[1]])
    write(tmp_path / "n", [[1]], layout="npy")
    folder = str(tmp_path)
    assert find_prefixes(folder) == [f"{folder}/a", f"{folder}/b", f"{folder}/n"]
    assert parse_input(folder) == [(1.0, f"{folder}/a"), (1.0, f"{folder}/b"), (1.0, f"{folder}/n")]
    assert parse_input(f"{folder}/a") == [(1.0, f"{folder}/a")]
    assert parse_input(f"0.3 {folder}/a 0.7 {folder}/b") == [(0.3, f"{folder}/a"), (0.7, f"{folder}/b")]


def test_the_fingerprint_samples_64_blocks_of_64_kib(tmp_path):
    """Evenly spaced, the first and the last included; what lies between them is not read."""
    count, block = 10_000_000, (64 << 10) // 2
    starts = [(count - block) * k // 63 for k in range(64)]
    ids = np.zeros(count, np.uint16)
    write(tmp_path / "a", [ids])
    first = content_fingerprint(open_tokens(str(tmp_path / "a")))
    write(tmp_path / "b", [ids], layout="npy")
    assert content_fingerprint(open_tokens(str(tmp_path / "b"))) == first
    tokens = np.memmap(tmp_path / "a.bin", np.uint16, "r+")
    for place in (0, starts[1], starts[40] + block - 1, count - 1):
        tokens[place] = 1
        assert content_fingerprint(open_tokens(str(tmp_path / "a"))) != first, place
        tokens[place] = 0
    for place in (block, starts[1] - 1, starts[40] + block, starts[63] - 1):
        tokens[place] = 1
        assert content_fingerprint(open_tokens(str(tmp_path / "a"))) == first, place
        tokens[place] = 0


def test_a_folder_with_a_blank_in_its_name_is_a_folder(tmp_path):
    folder = tmp_path / "我的 数据"
    folder.mkdir()
    write(folder / "a", [[1]])
    assert parse_input(str(folder)) == [(1.0, f"{folder}/a")]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("missing", "cannot list"),
        ("p1 p2", "not a weight"),
        ("1 a 2", "3 words"),
        ("-1 a 2 b", "0 or more"),
        ("nan a 2 b", "finite"),
        ("inf a 2 b", "finite"),
        ("0 a 0 b", "not all 0"),
    ],
)
def test_bad_input_dir(value, says):
    with pytest.raises(GptlmError, match=says):
        parse_input(value)


def test_an_empty_folder_is_named_with_what_it_holds(tmp_path):
    (tmp_path / "readme.md").write_text("x")
    with pytest.raises(GptlmError, match="has no token files.*readme.md"):
        find_prefixes(str(tmp_path))
