"""Flags of continuing prompts: FleetX's and PaddleNLP's words, and what is refused or has no effect."""

import pytest

from gptlm.commands.predict import parse_predict
from gptlm.errors import UsageError


def test_words_of_the_originals():
    arguments, notes = parse_predict(
        "--decode_strategy sampling --top_k 0 --top_p 1.0 --min_dec_len 2 --max_dec_len 9 --diversity_rate 0.0 "
        "--forced_eos_token_id None --use_topp_sampling False --model_type gpt2-cn".split()
    )
    assert (arguments.do_sample, arguments.top_k, arguments.top_p) == (True, 0, 1.0)
    assert (arguments.min_new_tokens, arguments.tgt_length) == (2, 9)
    assert [note.split()[0] for note in notes] == ["--use_topp_sampling", "--model_type"]
    assert parse_predict("--max-new-tokens 7 --decode_strategy beam_search --num_beams 3".split())[0].tgt_length == 7


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--num_return_sequences 2", "greedy search finds one; add --do_sample or --num_beams 2"),
        ("--num_return_sequences 3 --num_beams 2", "is more than --num_beams 2"),
        ("--num_return_sequences 3 --num_beams 2 --do_sample", "is more than --num_beams 2"),
        ("--num_return_sequences 0", "expected 1 to 10000"),
        ("--num_beams 0", "expected 1 to 1000"),
        ("--min_new_tokens 9 --tgt_length 8", r"expected at most --tgt_length \(8\)"),
        ("--min_new_tokens 900", r"expected at most --tgt_length \(200, its default\)"),
        ("--min_new_tokens -1", "expected at least 0"),
        ("--repetition_penalty 0", "--repetition_penalty 0: expected more than 0"),
        ("--repetition_penalty nan", "repetition_penalty"),
        ("--length_penalty inf", "length_penalty"),
        ("--top_p 0", "top_p"),
        ("--do_sample --temperature 0", "leave --do_sample out for greedy"),
        ("--bf16 --fp16", "both given"),
        ("--decode_strategy beam_search", "needs --num_beams of 2 or more"),
        ("--decode_strategy greedy_search --do_sample", "contradict"),
        ("--decode_strategy sampling --do_sample false", "contradict"),
        ("--decode_strategy greedy_search --num_beams 2", "has one beam"),
        ("--decode_strategy topk", "expected one of sampling"),
        ("--diversity_rate 0.5", "diverse beams are not implemented"),
        ("--prompt a --input_file b", "use one"),
        ("--serve --prompt a --num_beams 2", "leave out --prompt --num_beams"),
        ("--serve --port 65536", "--port 65536"),
    ],
)
def test_what_cannot_be_is_refused(words, says):
    with pytest.raises(UsageError, match=says):
        parse_predict(words.split())


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--num_beams 0", "--num_beams"),
        ("--num_beams -1", "--num_beams"),
        ("--tgt_length 0", "--tgt_length"),
        ("--num_return_sequences 0 --num_beams 2", "--num_return_sequences"),
        ("--serve --num_beams 0", "--num_beams"),
    ],
)
def test_one_wrong_flag_is_one_problem(words, flag):
    """Nothing is said of defaults that it does not go with."""
    with pytest.raises(UsageError) as error:
        parse_predict(words.split())
    assert "\n" not in str(error.value) and str(error.value).startswith(flag)


def test_piped_input_stands_behind_every_flag():
    for words, wanted in (
        ([], ([], "-")),
        (["--prompt", "a"], (["a"], None)),
        (["--input_file", "f"], ([], "f")),
        (["--serve"], ([], None)),
    ):
        arguments, _ = parse_predict(words, piped=True)
        assert (arguments.prompt, arguments.input_file) == wanted
    assert parse_predict([])[0].input_file is None


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        ("--top_k 5 --temperature 2", ["--top_k, --temperature has no effect without --do_sample"]),
        ("--length_penalty 2", ["--length_penalty has no effect without --num_beams"]),
        ("--port 80", ["--port has no effect without --serve"]),
        ("--serve --top_k 5 --port 80", []),
        ("--do_sample --top_k 5 --num_beams 2 --early_stopping", []),
        ("--max_new_tokens 5", []),
        (
            "--max_length 5",
            [
                "--max_length 5 counts new tokens, as in PaddleNLP; transformers counts the prompt, too "
                "(--max_new_tokens is the same in both)"
            ],
        ),
    ],
)
def test_flags_without_effect_are_noted(words, noted):
    assert list(parse_predict(words.split())[1]) == noted
