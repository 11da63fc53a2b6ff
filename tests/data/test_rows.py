"""Rows of fine-tuning: which ids are targets, what is cut, what of a text is a special token."""

import pytest
from transformers import AutoTokenizer

from gptlm.data.conversations import Content, Turn
from gptlm.data.rows import Encoded, Encoder, Lengths, PaddleEncoder, Text, text_encoder
from gptlm.errors import GptlmError
from gptlm.model.tokenizer import add_tokens, train_tokenizer

END = 0


def encode(texts):
    """A letter is its code."""
    return [Encoded([ord(x) for x in one.text], [(n, n + 1) for n in range(len(one.text))]) for one in texts]


def rows(*examples, source=8, target=5, total=12, **more):
    return Encoder(encode, END, Lengths(source, target, total), **more).rows(list(examples))


def shown(row):
    """Ids as letters, targets in capitals; a dot is the end, as a target an exclamation mark."""
    letters = ["." if i == END else chr(i) for i in row.ids]
    return "".join(x.upper() if m and x != "." else "!" if m else x for x, m in zip(letters, row.loss_mask))


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        ([Turn("abc", "xy")], "abcXY!"),  # the end is a target
        ([Turn("abcdefghijkl", "xy")], "efghijklXY!"),  # a long prompt loses its beginning, not the answer
        ([Turn("abcdefghijkl", "xy", "qr")], "ghijklqrXY!"),
        ([Turn("[abcdefghij]", "xy", "qr", (Content(1, 11),))], "[ghij]qrXY!"),  # nor its headings
        ([Turn("abcdefgh", "vwxyz")], "bcdefghVWXYZ"),  # an answer that is cut does not end; the prompt gives way
        ([Turn("", "xy")], ".XY!"),  # something must foretell the first token
        ([Turn("", "stuvwxyz", is_text=True)], ".STUVWXYZ!"),  # no limit but that of the row
        ([Turn("", "abcdefghijkl", is_text=True)], ".ABCDEFGHIJK"),
        ([Turn("a", "x"), Turn("b", "y")], "aX!bY!"),
        ([Turn("abc", "xy"), Turn("def", "uvwz")], "abcXY!"),  # what does not fit whole is skipped
        ([Turn("a", "x", in_loss=False), Turn("b", "y")], "ax.bY!"),  # context
        ([Turn("a", "", in_loss=False), Turn("b", "y")], "a.bY!"),
        ([Turn("a", "x"), Turn("b", "y", in_loss=False)], "aX!by."),
        ([Turn("abcde", "x", in_loss=False), Turn("fgh", "y")], "dex.fghY!"),  # what is oldest gives way
    ],
)
def test_rows(turns, wanted):
    (row,) = rows(turns, source=8 if len(turns[0].prompt) != 5 else 7)
    assert shown(row) == wanted


@pytest.mark.parametrize(
    ("side", "wanted"),
    [
        ("left", "[sss](efgh)<XY!"),  # the end of the prompt stays
        ("right", "[sss](abcd)<XY!"),
    ],
)
def test_the_side_that_is_cut(side, wanted):
    """The user's text is cut before the system prompt; headings and cue stay."""
    turn = Turn("[sss](abcdefgh)", "xy", "<", (Content(1, 4, "system"), Content(6, 14)))
    (row,) = rows([turn], source=12, total=20, side=side)
    assert shown(row) == wanted and row.truncated_prompts == 1
    (row,) = rows([turn], source=6, total=20, side=side)
    assert shown(row) == "[s]()<XY!"


def test_headings_that_have_no_room_leave_nothing_to_learn():
    (row,) = rows([Turn("[[[[a]]]]", "xy", "", (Content(4, 5),))], source=7)
    assert not row.loss_mask.any() and row.skipped_turns == 1


def test_a_cut_answer_ends_where_another_turn_follows_but_that_is_no_target():
    (row,) = rows([Turn("a", "uvwxyz"), Turn("b", "c")], total=20)
    assert shown(row) == "aUVWXY.bC!"


def test_the_answers_of_a_conversation_and_what_is_before_each():
    (row,) = rows([Turn("a", "x"), Turn("b", "y", in_loss=False), Turn("c", "z")])
    assert row.earlier == ((1, "x"),) and (row.prompt_length, row.response) == (7, "z")


def test_prompts_can_be_targets_too():
    (row,) = rows([Turn("abc", "xy")], train_on_prompt=True)
    assert shown(row) == "aBCXY!" and row.prompt_length == 3


def paddle(*turns, source=8, target=9, total=20):
    def letters(texts):
        return [[ord(letter) for letter in text] for text in texts]

    (row,) = PaddleEncoder(letters, END, Lengths(source, target, total)).rows([list(turns)])
    return row


def test_paddlenlp_s_encoding_ends_with_text_and_cuts_the_end_of_prompts():
    assert shown(paddle(Turn("ab", "x"))) == "ab </s>X </S>" and END not in paddle(Turn("ab", "x")).ids
    assert shown(paddle(Turn("abcdefghijkl", "x"))) == "abcdefghX </S>"
    assert shown(paddle(Turn("abcdefghijkl", "x", "qr"))) == "abcdefqrX </S>"


def test_paddlenlp_has_no_plain_texts():
    with pytest.raises(GptlmError, match="--paddle_compat encodes prompts and responses"):
        paddle(Turn("", "a", is_text=True))


def test_a_sample_without_targets_is_told():
    found = rows([Turn("abc", "")], [Turn("abc", "x", in_loss=False)])
    assert [row.loss_mask.any() for row in found] == [True, False]  # an empty answer is its end


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on a mat while two dogs ran far away"] * 5, 300)


def test_special_tokens_that_a_text_spells_stay_text(tokenizer):
    """As in preprocessing: `encode_special_tokens` of the library."""
    text = "the cat<|endoftext|> sat"
    (plain,) = text_encoder(tokenizer)([Text(text)])
    assert plain.ids == tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.eos_token_id not in plain.ids and tokenizer.decode(plain.ids) == text
    (allowed,) = text_encoder(tokenizer, allow_special_tokens=True)([Text(text)])
    assert allowed.ids == tokenizer(text)["input_ids"] and allowed.ids.count(tokenizer.eos_token_id) == 1


def test_an_answer_that_ends_with_an_allowed_end_of_text_gets_no_second_one(tokenizer):
    end, lengths = tokenizer.eos_token_id, Lengths(20, 40, 60)
    for allowed in (True, False):
        encoder = Encoder(text_encoder(tokenizer, allowed), end, lengths)
        (row,) = encoder.rows([[Turn("the cat ", "sat on<|endoftext|>")]])
        assert row.ids.tolist().count(end) == 1 and row.ids[-1] == end and row.loss_mask[-1]
        spelled = "" if allowed else "<|endoftext|>"
        assert tokenizer.decode(row.ids) == f"the cat sat on{spelled}<|endoftext|>"


def test_added_tokens_are_tokens_in_texts_but_for_those_of_the_chat_template(tokenizer, tmp_path):
    """And so with the saved tokenizer, which other commands load."""
    tokenizer.save_pretrained(tmp_path / "base")
    added = AutoTokenizer.from_pretrained(tmp_path / "base")
    added.chat_template = "{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    add_tokens(added, ["<user name>", "<|im_end|>"])
    added.save_pretrained(tmp_path / "added")
    for one in (added, AutoTokenizer.from_pretrained(tmp_path / "added")):
        (found,) = text_encoder(one)([Text("<user name> sat<|im_end|>")])
        assert len(one) == len(tokenizer) + 2
        assert found.ids[0] == len(tokenizer) and len(tokenizer) + 1 not in found.ids
        assert one.decode(found.ids) == "<user name> sat<|im_end|>"
        assert one.apply_chat_template([{"role": "user", "content": "a"}], return_dict=False)[-1] == len(tokenizer) + 1
