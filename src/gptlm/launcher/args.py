"""`gptlm launch`: `[launcher's arguments] SCRIPT [script's arguments]` becomes one plan in torchrun's terms.

The arguments are those of `paddle.distributed.launch`, and of OneFlow, whose training script launches itself: OneFlow's
arguments for nodes and GPUs are accepted before and after the script.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gptlm.config.field import LARGEST_PORT, arg, check_fields
from gptlm.config.parser import Parsed, Vocabulary, parse
from gptlm.config.problem import Problem, usage_error
from gptlm.config.run import tried
from gptlm.errors import UsageError, named
from gptlm.launcher import aliases
from gptlm.launcher.script import ONE_PROCESS, OURS, is_ours, program, split_command
from gptlm.secret import hidden, without_secrets

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"
CARD = r"\d+|(?:GPU|MIG)-[\w/-]+"
HELP = """
One process per GPU. On several nodes, run the same command on each.
[FILE.json] and the launcher's arguments come first, then one of pretrain, sft, evaluate and predict, or a script
(FILE.py or -m MODULE), with its arguments. A whole command that begins with python -m paddle.distributed.launch or
python -m oneflow_gpt.training is accepted too."""


def bad_devices(text: str) -> str | None:
    cards = _split_devices(text)
    if not all(re.fullmatch(CARD, card) for card in cards):
        return f"{text!r}: expected GPU indices like 0,1"
    return f"{text}: a GPU is listed twice" if len(set(cards)) < len(cards) else None


def bad_nodes(text: str) -> str | None:
    low, _, high = text.partition(":")
    if not low.isascii() or not low.isdigit() or int(low) < 1 or (high and not high.isdigit()):
        return f"{text}: expected the number of nodes"
    if high and int(high) != int(low):
        return f"{text}: elastic training is not implemented, {aliases.RESTARTS}; give one number of nodes"
    return None


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """Launcher"""

    devices: str | None = arg(
        None, "GPUs of this node, such as 0,1, one process each; unset: all visible GPUs", check=bad_devices
    )
    nproc_per_node: int | None = arg(None, "processes per node; unset: one per GPU, or 1 without a GPU", ge=1)
    nnodes: str | None = arg(None, "number of nodes; unset: number of ips, or 1", check=bad_nodes)
    master: str | None = arg(None, "rendezvous address:port, on one of the nodes")
    ips: list[str] = arg([], "addresses of all nodes in rank order", words=True)
    rank: int | None = arg(None, "rank of this node, from 0; unset: by its address in ips, or by the rendezvous")
    port: int | None = arg(
        None,
        "rendezvous port; unset: the port in master, a free port on one node, else 29500",
        ge=1,
        le=LARGEST_PORT,
    )
    host: str | None = arg(None, "address of this node, if it has several")
    job_id: str = arg("default", "job name, the same on all nodes")
    log_dir: str = arg("log", "folder for workerlog.N, the output of local process N")
    log_overwrite: bool = arg(False, "overwrite workerlog.N instead of appending")


LAUNCH = Vocabulary((LaunchArguments,), aliases.LAUNCH_RENAMED, aliases.LAUNCH_IGNORED, aliases.LAUNCH_REFUSED)


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What to start on this node.

    Attributes:
        processes: processes on this node.
        rank: of this node; None: assigned by the rendezvous.
        master: rendezvous address.
        port: rendezvous port; None: one node, any free port.
        devices: visible GPUs; empty: all.
        host: address of this node; None: found by torchrun.
        script: a path, or `-m` and a module (and gptlm's command).
        words: arguments of the script.
        notes: lines for the log.
        secrets: variables to add to the environment that no line shows.
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
    secrets: dict[str, str] = field(default_factory=dict)

    def torchrun(self) -> list[str]:
        """The torchrun command."""
        return ["torchrun", *self._rendezvous(), "--nproc_per_node", str(self.processes), *self.script, *self.words]

    def environment(self) -> dict[str, str]:
        """Variables to add to the environment."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}

    def shown(self) -> str:
        """Environment and command as a line for a shell."""
        return " ".join(
            [*(f"{k}={shlex.quote(v)}" for k, v in self.environment().items()), shlex.join(hidden(self.torchrun()))]
        )

    def _rendezvous(self) -> list[str]:
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

    Args:
        count_cards: counts the GPUs of the machine, if nothing else gives their number.
        is_own: whether an address belongs to this machine.

    Raises:
        UsageError: listing everything that is wrong.
    """
    before, script, words = split_command(argv)
    problems: list[Problem] = []
    started = tried(lambda: program(script), problems)
    parsed = tried(lambda: parse(LAUNCH, before), problems)
    inner = tried(lambda: parse(LAUNCH, _launch_arguments(started[0] if started else (), words)), problems)
    if parsed is None or inner is None:
        raise usage_error(problems, {})
    problems += _take_from_script(parsed, inner)
    arguments = parsed[LaunchArguments]
    problems += check_fields(arguments)
    devices = _split_devices(arguments.devices) if arguments.devices else ()
    if not problems:
        problems += [*_resolve_nodes(parsed, is_own), *_device_problems(parsed, devices, visible)]
    if problems or started is None:
        raise usage_error(problems, parsed.typed)
    command, note = started
    if note:
        parsed.note(note)
    # processes take it from their environment: other users see their command lines
    passed, token = without_secrets(words, "none") if is_ours(command) else (words, None)
    arguments = parsed[LaunchArguments]
    return LaunchPlan(
        processes=arguments.nproc_per_node or len(devices) or _default_processes(script, visible, count_cards),
        nodes=int(arguments.nnodes or 1),
        rank=arguments.rank,
        master=arguments.master or LOOPBACK,
        port=arguments.port,
        devices=devices,
        host=arguments.host,
        job_id=arguments.job_id,
        log_dir=Path(arguments.log_dir),
        log_overwrite=arguments.log_overwrite,
        script=command,
        words=tuple(passed),
        notes=tuple(parsed.notes),
        secrets={"HF_TOKEN": token} if token else {},
    )


def _launch_arguments(script: Sequence[str], words: Sequence[str]) -> list[str]:
    """The launcher's arguments among a script's: OneFlow's training script launches itself."""
    name = Path(script[-1]).name if script else ""
    pretrains = name in ("pretrain", "run_pretrain.py") or (name in OURS and list(words[:1]) == ["pretrain"])
    accepted = aliases.LAUNCH_WORDS_OF_PRETRAIN if pretrains else aliases.LAUNCH_WORDS_OF_SCRIPTS
    found: list[str] = []
    inside = False
    for word in words:
        if word.startswith("--"):
            inside = word[2:].partition("=")[0].replace("-", "_") in accepted
        found += [word] if inside else []
    return found


def _take_from_script(parsed: Parsed, inner: Parsed) -> Iterator[Problem]:
    """Use the script's arguments for nodes and GPUs; the script gets them as well."""
    for name in inner.typed:
        value = inner.value(name)
        if parsed.given(name) and parsed.value(name) != value:
            outer = f"{parsed.typed[name]} {_text(parsed.value(name))}"
            text = f"{inner.typed[name]} {_text(value)} among the script's arguments contradicts {outer}; give one"
            yield Problem("", text)
        parsed.set(name, value, inner.sources[name])
        parsed.typed.setdefault(name, inner.typed[name])


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _split_devices(text: str) -> tuple[str, ...]:
    return tuple(card.strip() for card in text.strip("'\"[]").split(","))


def _device_problems(parsed: Parsed, devices: tuple[str, ...], visible: str | None) -> Iterator[Problem]:
    known = [card.strip() for card in (visible or "").split(",") if card.strip()]
    hidden = next((card for card in devices if known and card not in known), None)
    if hidden is not None:
        text = f"{parsed[LaunchArguments].devices}: GPU {hidden} is not in CUDA_VISIBLE_DEVICES={visible}"
        yield Problem("devices", f"{text} of the environment; use those GPUs, or unset the variable")
    asked, given = parsed[LaunchArguments].nproc_per_node, ",".join(devices)
    if asked and devices and asked > len(devices):
        yield Problem(
            "nproc_per_node", f"{asked} with {len(devices)} devices ({given}): each process needs its own GPU"
        )
    elif asked and asked < len(devices):
        parsed.note(f"{named('nproc_per_node')} {asked} leaves {len(devices) - asked} of the devices {given} idle")


def check_cards(plan: LaunchPlan, visible: str | None, count_cards: Callable[[], int]) -> None:
    """Raises UsageError if `plan` starts more processes on this node than it has GPUs; without any, they use CPUs."""
    cards = len(plan.devices) or _count_visible(visible, count_cards)
    if 0 < cards < plan.processes:
        raise UsageError(
            f"{plan.processes} processes on a machine with {cards} GPUs, and each needs its own: give "
            f"{named('num_gpus_per_node')} {cards}, with degrees and batch sizes that fit, or {named('device')} cpu"
        )


def _default_processes(script: Sequence[str], visible: str | None, count_cards: Callable[[], int]) -> int:
    """The processes of a node if no argument names their number."""
    return 1 if script[-1] in ONE_PROCESS else _count_visible(visible, count_cards) or 1


def _count_visible(visible: str | None, count_cards: Callable[[], int]) -> int:
    if visible is not None:
        return sum(re.fullmatch(CARD, card.strip()) is not None for card in visible.split(","))
    return count_cards()


def _resolve_nodes(parsed: Parsed, is_own: Callable[[str], bool]) -> Iterator[Problem]:
    """Fill in nnodes, master, port and rank."""
    yield from _split_master(parsed)
    arguments = parsed[LaunchArguments]
    ips = arguments.ips
    nodes = int(arguments.nnodes.partition(":")[0]) if arguments.nnodes else len(ips) or 1
    if ips and nodes != len(ips):
        yield Problem("ips", f"has {len(ips)} addresses, {named('nnodes')} is {nodes}; they must agree")
        return
    master, port, rank = arguments.master, arguments.port, arguments.rank
    if nodes == 1:
        if master and not ips:
            parsed.note(f"{named('master')} has no effect with one node; for several add {named('nnodes')}")
        master = LOOPBACK
    elif master is None and not ips:
        remedy = f"add {named('master')} ADDRESS:PORT of one of them, the same on each, "
        remedy += f"or {named('ips')} with all addresses"
        yield Problem("", f"{nodes} nodes need a rendezvous: {remedy}")
    else:
        master, port = master or ips[0], port or DEFAULT_PORT
    if rank is None and nodes == 1:
        rank = 0
    elif rank is None and ips:
        own = [index for index, ip in enumerate(ips) if (ip == arguments.host if arguments.host else is_own(ip))]
        if len(own) == 1:
            rank = own[0]
        else:
            which, here = "more than one" if own else "none", arguments.host or "this machine"
            remedy = f"add {named('rank')} N (0 on {ips[0]})"
            yield Problem("ips", f"{','.join(ips)}: {which} of the addresses belongs to {here}; {remedy}")
    if rank is not None and not 0 <= rank < nodes:
        yield Problem("rank", f"{rank}: expected 0 to {nodes - 1} with {nodes} nodes")
    parsed.put(replace(arguments, nnodes=str(nodes), master=master, port=port, rank=rank))


def _split_master(parsed: Parsed) -> Iterator[Problem]:
    """Split `--master` into address and port."""
    arguments = parsed[LaunchArguments]
    text = arguments.master
    if text is None:
        return
    scheme, found, rest = text.rpartition("://")
    if found and scheme != "http":
        yield Problem("master", f"{text}: {scheme} is not supported; give ADDRESS:PORT of one of the nodes")
        return
    address, port = re.fullmatch(r"(.*?)(?::(\d+))?/?", rest).groups()  # type: ignore[union-attr]
    if not address or (":" in address and not address.startswith("[")) or not 1 <= int(port or 1) <= LARGEST_PORT:
        yield Problem("master", f"{text}: expected ADDRESS:PORT")
        return
    if port and arguments.port not in (None, int(port)):
        yield Problem("master", f"{text} and {named('port')} {arguments.port} name different ports; give one")
    parsed.put(replace(arguments, master=address, port=int(port) if port else arguments.port))
