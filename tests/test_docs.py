"""The documentation: commands parse, links lead somewhere, and the reference is that of the arguments."""

import json
import os
import re
import shlex
import subprocess
import sys
import unicodedata
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from docs.generate_reference import FOLDER, pages
from transformers import AutoModelForCausalLM, AutoTokenizer

from gptlm.cli import COMMANDS, DATA_TOOLS, main
from gptlm.commands.chat import parse_chat
from gptlm.commands.convert import parse_convert
from gptlm.commands.evaluate import EVALUATE
from gptlm.commands.merge_lora import parse_merge
from gptlm.commands.plan import parse_plan
from gptlm.commands.predict import resolve_predict
from gptlm.commands.preprocess import parse_preprocess
from gptlm.commands.pretrain import parse_pretrain
from gptlm.commands.report import parse_report
from gptlm.commands.serve import parse_serve
from gptlm.commands.sft import parse_sft
from gptlm.commands.tokenizer import parse_tokenizer
from gptlm.config.parser import parse
from gptlm.launcher.args import parse_launch
from tests.conftest import ROOT

GUIDE = sorted([ROOT / "README.md", *ROOT.glob("README.*.md"), *ROOT.glob("docs/**/*.md")])
PAGES = sorted({*GUIDE, *ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("tests/*/*.md")})
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """A page without its code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "X", text)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.M):
        plain = unicodedata.normalize("NFKD", heading.replace("`", "")).lower()
        found.add(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", plain).strip()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.md", navigation.partition("\nnav:")[2]))
    here = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert here <= named
    assert {name for name in named - here if not name.startswith("project/")} == set()


def test_the_reference_is_that_of_the_arguments():
    """If this fails: python docs/generate_reference.py."""
    here = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert here == pages()


def commands_of(path: Path) -> list[str]:
    """The lines of a page's shell code, without comments."""
    blocks = re.findall(
        r"^```(?:bash|sh|shell|console)\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.S | re.M
    )
    lines = (line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


LINES = [(page, line) for page in GUIDE for line in commands_of(page)]
NOT_OURS = ("docker", "llama-server", "lm_eval", "pip", "pip3", "source", "transformers", "vllm")
PARSERS = {
    "pretrain": lambda words, environment: not parse_pretrain(words, environment).refusals,
    "sft": parse_sft,
    "merge-lora": lambda words, _: parse_merge(words),
    "convert": lambda words, _: parse_convert(words),
    "preprocess": lambda words, _: parse_preprocess(words),
    "tokenizer": lambda words, _: parse_tokenizer(words),
    "predict": lambda words, _: not resolve_predict(words, printing=True).refusals,  # its model need not be there
    "chat": lambda words, _: parse_chat(words),
    "serve": lambda words, _: parse_serve(words),
    "evaluate": lambda words, _: parse(EVALUATE, words),  # parse_evaluate reads the model's config
    "data": lambda words, _: DATA_TOOLS[words[0]][2](words[1:]),
    "plan": lambda words, _: parse_plan(words),
    "report": lambda words, _: parse_report(words),
    "launch": lambda words, _: parse_launch(words, is_own=lambda address: False),
}
SCRIPTS = {command.script: name for name, command in COMMANDS.items()}


def has_parsed(line: str) -> bool:
    """Whether a line of shell code is a command that gptlm accepts, or none of gptlm's."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    program, rest = words[0], words[1:]
    if program == "make":
        return all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M) for target in rest)
    if program in ("bash", "sbatch") and rest[0] != "scripts/slurm.sh":
        return (ROOT / rest[0]).is_file()
    if rest and rest[0].endswith("launch_container.py"):
        return (ROOT / rest[0]).is_file() and has_parsed(rest[rest.index("--cmd") + 1])
    processes = "1"
    if program == "torchrun":
        processes = rest[rest.index("--nproc_per_node") + 1]
        begin = next(n for n, word in enumerate(rest) if word == "-m" or word.endswith(".py"))
        program, rest = "python", rest[begin:]
    if program == "sbatch":
        program, rest = "gptlm", ["pretrain", *rest[1:]]
    if program in ("python", "python3"):
        if rest[:2] == ["-m", "gptlm.cli"]:
            program, rest = "gptlm", rest[2:]
        elif rest[0].startswith(("benchmarks/", "docs/")):
            return (ROOT / rest[0]).is_file()
        elif rest[0] == "-m":
            return rest[1] in ("nltk.downloader",)
        else:
            assert (ROOT / rest[0]).is_file()
            program, rest = "gptlm", [SCRIPTS[rest[0].removeprefix("scripts/")], *rest[1:]]
    if program != "gptlm":
        return program in NOT_OURS
    name, words = rest[0], rest[1:]
    if "--print_config" in words and name == "pretrain":
        words.remove("--print_config")
        return not parse_pretrain(words, {}, printing=True).missing
    return bool(PARSERS[name](words, {"WORLD_SIZE": processes}))


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{p.stem}: {line[:50]}" for p, line in LINES])
def test_the_command_parses(page, line):
    assert has_parsed(line)


def test_there_are_commands():
    named = {re.search(r"gptlm (?:--|)([\w-]+)|scripts/(\w+\.py)", line) for _, line in LINES}
    found = {match[1] or SCRIPTS.get(match[2]) for match in named if match}
    assert set(PARSERS) - found <= {"launch"}  # which stands in the tables of the migration pages
    assert len(LINES) > 60


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_named_in_a_sentence_exist(page):
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`gptlm ([a-z][\w-]*)", text))
    assert named <= set(COMMANDS)
    assert set(re.findall(r"`gptlm data ([a-z]+)", text)) <= set(DATA_TOOLS)


def refused_flags():
    """The flags that a migration page lists as refused whatever their value is."""
    for page in sorted(ROOT.glob("docs/migration/*.md")):
        rows = page.read_text(encoding="utf-8").partition("\n| refused | use |\n")[2].partition("\n\n")[0]
        for row in rows.splitlines():
            cell = re.sub(r" \(old names\)$| of [a-z ]+$", "", row.split(" | ")[0].removeprefix("| "))
            if re.fullmatch(r"(`--[\w-]+`(, )?)+", cell):
                yield from re.findall(r"--[\w-]+", cell)


@pytest.mark.parametrize("flag", list(refused_flags()))
def test_flags_listed_as_refused_are_refused_with_a_reason(flag, capsys):
    for name in ("pretrain", "sft", "predict", "preprocess"):
        assert main([name, flag, "true"]) == 2
    assert f"{flag} true: " in capsys.readouterr().err


SHELL = [*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts/oneflow/tools").glob("*.py")]
SCRIPT_FLAGS = {flag for path in SHELL for flag in re.findall(r"--(\w+)", path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_named_in_a_sentence_exist(page):
    vocabularies = [command.vocabulary for command in COMMANDS.values()] + [tool[1] for tool in DATA_TOOLS.values()]
    known = set().union(*(vocabulary.names() for vocabulary in vocabularies))
    known |= {"help", "version", "debug", "print_config", "x"} | SCRIPT_FLAGS
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    flags = {flag.replace("-", "_") for flag in re.findall(r"`--([a-zA-Z][\w.-]*)", text)}
    assert {flag for flag in flags if flag not in known and flag.removeprefix("no_") not in known} == set()


@pytest.mark.slow
def test_getting_started_as_a_new_user_types_it(tmp_path):
    """The commands of the page in their order, with fewer steps and a smaller model, on text that Python contains."""
    (tmp_path / "demo").mkdir()
    texts = [{"text": text} for text in topics.values()]
    (tmp_path / "demo/corpus.jsonl").write_text("\n".join(json.dumps(text) for text in texts), encoding="utf-8")
    changes = {"--max_steps 400": "--max_steps 4", "--eval_steps 200": "--eval_steps 2", "--logging_steps 20": ""}
    changes |= {"--hidden_size 256": "--hidden_size 32", "--num_hidden_layers 3": "--num_hidden_layers 1"}
    lines = [line for line in commands_of(ROOT / "docs/getting-started.md") if re.match("gptlm|torchrun", line)]
    assert len(lines) == 5
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    for line in lines:
        for typed, small in changes.items():
            line = line.replace(typed, small)
        program, *words = shlex.split(line)
        module = ["gptlm.cli"] if program == "gptlm" else ["torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [sys.executable, "-m", *module, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-6000:]
        if words[0] == "predict":
            assert done.stdout.strip()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "my/model")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "my/model")) <= model.config.vocab_size
    states = [json.loads((tmp_path / f"my/{name}/trainer_state.json").read_text()) for name in ("model", "model2")]
    assert [state["global_step"] for state in states] == [4, 4]
