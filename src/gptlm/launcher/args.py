"""The launcher's command line, `[launcher's words] SCRIPT [script's words]`, becomes one plan in torchrun's terms.

The words are PaddlePaddle's (`paddle.distributed.launch`) and OneFlow's, whose training script launches itself: its
words for nodes and GPUs count wherever they stand.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlm.config.field import arg, check_fields
from gptlm.config.origin import Origin, Source
from gptlm.config.parser import Parsed, Vocabulary, build, parse
from gptlm.errors import UsageError
from gptlm.launcher import aliases as spellings
from gptlm.launcher.script import program, split_command

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"
RESOLVED = Source(Origin.DERIVED, "resolved")
CARD = r"\d+|(?:GPU|MIG)-[\w/-]+"
HELP = """
One process per GPU; on several nodes the same command starts on each.
[FILE.json] and the flags come first, then a script (FILE.py or -m MODULE) and its own flags. A whole command that
begins with python -m paddle.distributed.launch, or python -m oneflow_gpt.training, may follow as it is."""


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """One process per GPU, on one node or on several: the same command starts on each."""

    devices: str | None = arg(None, "cards of this node, as 0,1; one process for each; unset: all that are visible")
    nproc_per_node: int | None = arg(
        None, "processes on this node; unset: one for each card, 1 where there is none", ge=1
    )
    nnodes: str | None = arg(None, "nodes; unset: as many as ips names, or 1")
    master: str | None = arg(None, "address:port of one of the nodes, at which they meet")
    ips: list[str] = arg([], "addresses of all nodes, in the order of their ranks", words=True)
    rank: int | None = arg(None, "this node's rank, from 0; unset: found by its address in ips, or at the meeting")
    port: int | None = arg(
        None, "port of the meeting; unset: that of master, a free one on one node, else 29500", ge=1, le=2**16 - 1
    )
    host: str | None = arg(None, "this node's address, where it has several")
    job_id: str = arg("default", "name of the run, the same on all nodes")
    log_dir: str = arg("log", "folder of workerlog.N, the output of process N of this node")
    log_overwrite: bool = arg(False, "begin workerlog.N anew instead of adding to it")


LAUNCH = Vocabulary((LaunchArguments,), spellings.LAUNCH_RENAMED, spellings.LAUNCH_IGNORED, spellings.LAUNCH_REFUSED)


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What to start on this node.

    Attributes:
        processes: processes on this node.
        rank: of this node; None: the nodes find their ranks when they meet.
        master: address at which the processes meet.
        port: None: one node, any free port.
        devices: the cards the processes may see; none: all.
        host: this node's address; None: the machine's own answer.
        script: a path, or `-m` and a module (and gptlm's command).
        words: what the script is given.
        notes: lines for the user.
    """

    processes: int
    nodes: int
    rank: int | None
    master: str
    port: int | None
    devices: tuple[str, ...]
    host: str | None
    job_id: str
    log_dir: Path
    log_overwrite: bool
    script: tuple[str, ...]
    words: tuple[str, ...]
    notes: tuple[str, ...]

    def torchrun(self) -> list[str]:
        """The command, `torchrun` its first word."""
        return ["torchrun", *self._meeting(), "--nproc_per_node", str(self.processes), *self.script, *self.words]

    def environment(self) -> dict[str, str]:
        """What the command's environment has beyond ours."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}

    def shown(self) -> str:
        """Environment and command as a line for a shell."""
        return " ".join(
            [*(f"{k}={shlex.quote(v)}" for k, v in self.environment().items()), shlex.join(self.torchrun())]
        )

    def _meeting(self) -> list[str]:
        if self.port is None:
            return ["--standalone", "--local_addr", LOOPBACK]
        here = ["--local_addr", self.host] if self.host and self.nodes > 1 else []
        nodes = ["--nnodes", str(self.nodes), *here]
        if self.rank is None:
            endpoint = f"{self.master}:{self.port}"
            return [*nodes, "--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", self.job_id]
        rank = ["--node_rank", str(self.rank)] if self.nodes > 1 else []
        return [*nodes, *rank, "--master_addr", self.master, "--master_port", str(self.port)]


def parse_launch(
    argv: Sequence[str],
    visible: str | None = None,
    *,
    count_cards: Callable[[], int] = lambda: 0,
    is_own: Callable[[str], bool] = lambda address: False,
) -> LaunchPlan:
    """The plan of a command line under CUDA_VISIBLE_DEVICES=`visible`.

    `count_cards` counts the machine's GPUs where nothing else says how many; `is_own` knows the machine's addresses.

    Raises:
        UsageError: listing everything that is wrong.
    """
    before, script, words = split_command(argv)
    problems: list[str] = []
    try:
        started, note = program(script)
    except UsageError as error:
        problems.append(str(error))
    try:
        parsed = parse(LAUNCH, before)
        problems += _take_script_words(parsed, words)
    except UsageError as error:
        raise UsageError("\n".join([*problems, str(error)])) from None
    values = parsed.values
    devices, wrong = _devices(values["devices"], visible)
    problems += [*wrong, *_ranges(values)]
    problems += [problem.marked for problem in check_fields(build(LaunchArguments, values))]
    problems += [] if problems else [*_nodes(parsed, is_own), *_processes(parsed, devices)]
    if problems:
        raise UsageError("\n".join(problems))
    if note:
        parsed.note(note)
    processes = values["nproc_per_node"] or len(devices) or _cards(visible, count_cards)
    taken = {name: values[name] for name in ("master", "port", "host", "job_id", "log_overwrite")}
    return LaunchPlan(
        **taken, processes=processes, nodes=int(values["nnodes"]), rank=values["rank"], devices=devices,
        log_dir=Path(values["log_dir"]), script=started, words=tuple(words), notes=tuple(parsed.notes),
    )  # fmt: skip


def _take_script_words(parsed: Parsed, words: Sequence[str]) -> Iterator[str]:
    """Take over what OneFlow's script is told about nodes and GPUs; the script is told as well."""
    taken: list[str] = []
    inside = False
    for word in words:
        if word.startswith("--"):
            inside = word[2:].partition("=")[0].replace("-", "_") in spellings.LAUNCH_WORDS_OF_SCRIPTS
        taken += [word] if inside else []
    told = parse(LAUNCH, taken)
    for name, source in told.sources.items():
        if source.origin is Origin.DEFAULT:
            continue
        if not parsed.is_default(name) and parsed.values[name] != told.values[name]:
            yield (
                f"{source.text} {_text(told.values[name])} among the script's words contradicts "
                f"{parsed.sources[name].text} {_text(parsed.values[name])}; give one"
            )
        parsed.set(name, told.values[name], source)


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _devices(text: str | None, visible: str | None) -> tuple[tuple[str, ...], list[str]]:
    """The cards named by `text`, and what is wrong with it."""
    if text is None:
        return (), []
    cards = [card.strip() for card in text.strip("'\"[]").split(",")]
    bad = next((card for card in cards if not re.fullmatch(CARD, card)), None)
    if bad is not None:
        return (), [f"--devices {text!r}: expected the numbers of cards, as 0,1"]
    if len(set(cards)) < len(cards):
        return (), [f"--devices {text}: a card is named twice"]
    known = [card.strip() for card in (visible or "").split(",") if card.strip()]
    missing = [card for card in cards if known and card not in known]
    if missing:
        return (), [
            f"--devices {text}: card {missing[0]} is not in CUDA_VISIBLE_DEVICES={visible}, which the environment "
            "sets; name some of those, or unset it"
        ]
    return tuple(cards), []


def _cards(visible: str | None, count_cards: Callable[[], int]) -> int:
    if visible is not None:
        return sum(re.fullmatch(CARD, card.strip()) is not None for card in visible.split(",")) or 1
    return count_cards() or 1


def _ranges(values: Mapping[str, Any]) -> Iterator[str]:
    nnodes = values["nnodes"]
    low, _, high = (nnodes or "1").partition(":")
    if not low.isascii() or not low.isdigit() or int(low) < 1 or (high and not high.isdigit()):
        yield f"--nnodes {nnodes}: expected the number of nodes"
    elif high and int(high) != int(low):
        yield f"--nnodes {nnodes}: elastic runs are not implemented, {spellings.RESTARTS}; give one number of nodes"


def _nodes(parsed: Parsed, is_own: Callable[[str], bool]) -> Iterator[str]:
    """Fill in nnodes, master, port and rank."""
    values, ips = parsed.values, parsed.values["ips"]
    nodes = int(values["nnodes"].partition(":")[0]) if values["nnodes"] else len(ips) or 1
    if ips and nodes != len(ips):
        yield f"--ips names {len(ips)} nodes, --nnodes {nodes}; make them agree"
    parsed.set("nnodes", str(nodes), RESOLVED)
    yield from _master(parsed)
    if nodes == 1:
        if values["master"] and not ips:
            parsed.note("--master has no effect with one node; for several add --nnodes")
        parsed.set("master", LOOPBACK, RESOLVED)
    elif values["master"] is None and not ips:
        yield (
            f"{nodes} nodes need to know where to meet: add --master ADDRESS:PORT of one of them, the same on each, or "
            "--ips with the addresses of all"
        )
    else:
        parsed.set("master", values["master"] or ips[0], RESOLVED)
        parsed.set("port", values["port"] or DEFAULT_PORT, RESOLVED)
    if values["rank"] is None and (ips or nodes == 1):
        yield from _find_rank(parsed, nodes, is_own)
    if values["rank"] is not None and not 0 <= values["rank"] < nodes:
        yield f"--rank {values['rank']}: expected 0 to {nodes - 1}, one of {nodes} nodes"


def _master(parsed: Parsed) -> Iterator[str]:
    """Split `--master` into address and port."""
    text = parsed.values["master"]
    if text is None:
        return
    scheme, found, rest = text.rpartition("://")
    if found and scheme != "http":
        yield f"--master {text}: {scheme} is not used; give ADDRESS:PORT of one of the nodes"
        return
    address, port = re.fullmatch(r"(.*?)(?::(\d+))?/?", rest).groups()  # type: ignore[union-attr]
    if not address or (":" in address and not address.startswith("[")) or not 1 <= int(port or 1) < 2**16:
        yield f"--master {text}: expected ADDRESS:PORT"
        return
    parsed.set("master", address, parsed.sources["master"])
    if port and parsed.values["port"] not in (None, int(port)):
        yield f"--master {text} and --port {parsed.values['port']} name different ports; give one"
    elif port:
        parsed.set("port", int(port), parsed.sources["master"])


def _find_rank(parsed: Parsed, nodes: int, is_own: Callable[[str], bool]) -> Iterator[str]:
    """This node's rank by its address among --ips."""
    ips, host = parsed.values["ips"], parsed.values["host"]
    own = [place for place, address in enumerate(ips) if (address == host if host else is_own(address))]
    if nodes == 1:
        parsed.set("rank", 0, RESOLVED)
    elif len(own) == 1:
        parsed.set("rank", own[0], RESOLVED)
    else:
        which = "none of" if not own else "more than one of"
        yield f"{which} the nodes {','.join(ips)} is {host or 'this machine'}: add --rank N (0 on {ips[0]})"


def _processes(parsed: Parsed, devices: tuple[str, ...]) -> Iterator[str]:
    asked = parsed.values["nproc_per_node"]
    if asked is None or not devices:
        return
    if asked > len(devices):
        yield f"--nproc_per_node {asked} with {len(devices)} devices ({','.join(devices)}): one process needs one card"
    elif asked < len(devices):
        parsed.note(f"--nproc_per_node {asked} leaves {len(devices) - asked} of the devices {','.join(devices)} idle")
