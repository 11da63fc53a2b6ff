"""`gptlm preprocess`: text to token files."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gptlm.compat import paddlenlp, transformers
from gptlm.config.args.data import PreprocessArguments, PreprocessJob
from gptlm.config.field import check_fields
from gptlm.config.model_size import drop_tokenizer_class, is_tokenizer_class
from gptlm.config.parser import Parsed, Vocabulary, parse
from gptlm.config.problem import Problem, missing, not_a_folder, usage_error
from gptlm.errors import named

PREPROCESS = Vocabulary(
    (PreprocessArguments,),
    transformers.PREPROCESS_RENAMED | paddlenlp.PREPROCESS_RENAMED,
    transformers.PREPROCESS_IGNORED | paddlenlp.PREPROCESS_IGNORED,
    paddlenlp.PREPROCESS_REFUSED,
)


def parse_preprocess(argv: Sequence[str]) -> PreprocessJob:
    """Raises UsageError listing everything that is wrong."""
    parsed = parse(PREPROCESS, argv)
    megatron = parsed.aliases.get("input_path") == "input"  # Megatron-LM's name selects its conventions
    arguments = parsed[PreprocessArguments]
    problems = [
        *missing(arguments, "input_path", "output_prefix"),
        *not_a_folder("output_prefix", arguments.output_prefix),
        *check_fields(arguments),
        *_tokenizer_problems(parsed),
    ]
    if arguments.shard != "1/1" and arguments.max_doc_num is not None:
        text = f"counts documents of the whole input; leave it out with {named('shard')}"
        problems.append(Problem("max_doc_num", text))
    if not megatron and len(arguments.json_keys) > 1:
        text = "with several keys makes several corpora with Megatron-LM's file names: use --input"
        problems.append(Problem("json_keys", text))
    if problems:
        raise usage_error(problems, parsed.typed)
    _derive_sentences(parsed)
    part, parts = (int(number) for number in arguments.shard.split("/"))
    return PreprocessJob(parsed[PreprocessArguments], megatron, (part, parts), tuple(parsed.notes))


def _derive_sentences(parsed: Parsed) -> None:
    """Log which arguments for sentences have no effect, and how sentences differ from the original libraries."""
    arguments = parsed[PreprocessArguments]
    if not arguments.split_sentences:
        for name in ("keep_newlines", "lang", "sequence_level"):
            if parsed.given(name):
                parsed.note(f"--{name} has no effect without --split_sentences")
        if arguments.chinese:
            parsed.note("--chinese has no effect: byte-level BPE encodes every language")
        parsed.put(replace(arguments, sequence_level="document"))
        return
    if arguments.chinese and parsed.given("lang"):
        parsed.note(f"--lang {arguments.lang} has no effect with --chinese: each line is a sentence")
    if arguments.sequence_level == "document":
        parsed.note(
            "--split_sentences: text is encoded sentence by sentence, without the white space between sentences "
            "(--keep_newlines keeps it). Each document stays one sequence. In PaddleNLP and Megatron-LM each sentence "
            "is a sequence, and GPT training shuffles the sentences of all documents (--sequence_level sentence)"
        )
    else:
        parsed.note(
            "--sequence_level sentence: each sentence is a sequence, as in PaddleNLP and Megatron-LM, and GPT training "
            "shuffles the sentences of all documents"
        )


def _tokenizer_problems(parsed: Parsed) -> Iterator[Problem]:
    arguments = parsed[PreprocessArguments]
    files = {"vocab_file": arguments.vocab_file, "merge_file": arguments.merge_file}
    given = [name for name, file in files.items() if file]
    if len(given) == 1 and arguments.model_name_or_path is None:
        other = next(name for name, file in files.items() if not file)
        yield Problem(given[0], f"is given without {named(other)}; GPT-2's tokenizer needs both")
        return
    if arguments.tokenizer_type == "GPT2BPETokenizer" and not given and arguments.model_name_or_path is None:
        need = f"{named('vocab_file')} and {named('merge_file')}"
        yield Problem("tokenizer_type", f"GPT2BPETokenizer needs {need}")
        return
    name = arguments.model_name_or_path or arguments.tokenizer_model or arguments.tokenizer_name
    remedy = f"give {named('model_name_or_path')} DIR"
    if not given and is_tokenizer_class(name):
        yield Problem("tokenizer_name", f"{name} is a class without a vocabulary: {remedy}")
        return
    drop_tokenizer_class(parsed, "tokenizer_name", arguments.model_name_or_path)
    rest = parsed[PreprocessArguments].tokenizer_name
    if rest and rest != name:
        parsed.note(f"{named('tokenizer_name')} {rest} has no effect: the tokenizer of {name} is used")
    if not given and name is None:
        yield Problem("", f"no tokenizer: {remedy}, or {named('vocab_file')} and {named('merge_file')}")
