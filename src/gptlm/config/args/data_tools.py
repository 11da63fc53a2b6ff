"""Flags of `gptlm data`: looking at token files and at the order they are read in."""

from collections.abc import Sequence
from dataclasses import dataclass

from gptlm.compat import paddlenlp as spellings
from gptlm.config.args.training import bad_split
from gptlm.config.field import LARGEST_SEED, arg, check_fields
from gptlm.config.parser import Vocabulary, build, parse
from gptlm.config.problem import usage_error
from gptlm.data.order import DATA_ORDERS
from gptlm.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class OrderArguments:
    """The sample order."""

    input_dir: str | None = arg(
        None, "folder with token files, one prefix, or 'weight1 prefix1 weight2 prefix2 ...'", words=True
    )
    split: str = arg("949,50,1", "shares of train, valid and test, by sequence", check=bad_split)
    max_seq_length: int = arg(1024, "tokens a sample trains on", ge=1)
    num_samples: str = arg("1,1,1", "samples asked of train, valid and test; they fix the number of epochs")
    seed: int = arg(42, "seed of the data order", ge=0, le=LARGEST_SEED)
    data_order: str = arg("paddlenlp", "whose sample order", choices=DATA_ORDERS)
    data_cache: str | None = arg(None, "folder to keep the index in; unset: it is not kept")
    json: bool = arg(False, "print one JSON object with a hash of all samples and the first 8")
    sample: int = arg(0, "for `show`: number of the training sample", ge=0)
    tokenizer_name_or_path: str | None = arg(None, "for `show`: tokenizer folder; unset: the one noted beside the data")


@dataclass(frozen=True, kw_only=True)
class PrefixArguments:
    """One corpus."""

    prefix: str | None = arg(None, "path of the token files without suffix; may stand alone after the command")
    vocab_size: int | None = arg(None, "ids must lie below this; unset: the vocabulary noted beside the data", ge=1)


@dataclass(frozen=True, kw_only=True)
class CopyArguments:
    """Several corpora into one, or one into another format."""

    input: list[str] = arg([], "prefixes of the token files to read, or one folder with them, joined in this order")
    output_prefix: str | None = arg(None, "path of the result without suffix")
    dataset_impl: str = arg("mmap", "format of the result", choices=("mmap", "lazy", "cached", "npy"))
    vocab_size: int | None = arg(None, "ids must lie below this; unset: the vocabulary noted beside the data", ge=1)


ORDER = Vocabulary((OrderArguments,), spellings.ORDER_RENAMED)
COPY = Vocabulary((CopyArguments,), spellings.COPY_RENAMED)
PREFIX = Vocabulary((PrefixArguments,))


@dataclass(frozen=True)
class OrderQuestion:
    """Checked `OrderArguments`; `counts` are the samples asked of train, valid and test."""

    arguments: OrderArguments
    counts: tuple[int, int, int]


def parse_order(argv: Sequence[str]) -> OrderQuestion:
    """Raises UsageError listing everything that is wrong."""
    values = parse(ORDER, argv).values
    problems = [] if values["input_dir"] else ["--input_dir is missing"]
    problems += [problem.marked for problem in check_fields(build(OrderArguments, values))]
    words = values["num_samples"].split(",")
    if len(words) != 3 or not all(word.strip().isdigit() for word in words):
        problems.append(f"--num_samples {values['num_samples']!r}: expected three whole numbers like 200,20,1")
    if problems:
        raise UsageError("\n".join(problems))
    train, valid, test = (int(word) for word in words)
    return OrderQuestion(build(OrderArguments, values), (train, valid, test))


def parse_copy(argv: Sequence[str]) -> CopyArguments:
    """Raises UsageError listing everything that is wrong."""
    values = parse(COPY, argv).values
    problems = [f"--{name} is missing" for name in ("input", "output_prefix") if not values[name]]
    if (values["output_prefix"] or "").endswith("/"):
        problems.append(f"--output_prefix {values['output_prefix']}: expected folder/name, this is a folder")
    values["input"] = [_prefix(name) for name in values["input"]]
    problems += [problem.marked for problem in check_fields(build(CopyArguments, values))]
    if problems:
        raise UsageError("\n".join(problems))
    return build(CopyArguments, values)


def parse_prefix(argv: Sequence[str]) -> PrefixArguments:
    """`PREFIX` or `--prefix PREFIX`. Raises UsageError if it is missing."""
    words = list(argv)
    if words and not words[0].startswith("--"):
        words.insert(0, "--prefix")
    values = parse(PREFIX, words).values
    if not values["prefix"]:
        raise UsageError("the prefix of the token files is missing: gptlm data check PREFIX")
    values["prefix"] = _prefix(values["prefix"])
    if problems := check_fields(build(PrefixArguments, values)):
        raise usage_error(problems, {})
    return build(PrefixArguments, values)


def _prefix(name: str) -> str:
    """The prefix, where one file of the pair was named."""
    for suffix in (".bin", ".idx", "_ids.npy", "_idx.npz", "_ids.npz"):
        name = name.removesuffix(suffix)
    return name
