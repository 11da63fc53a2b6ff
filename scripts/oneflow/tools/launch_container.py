"""Run a command in a container: python3 tools/launch_container.py --image gptlm --cmd "gptlm pretrain ..."

The container has all GPUs, the host's network and memory, the current folder, and /data if it exists. On several nodes,
run the same command on each. The flags are those of OneFlow's tools/launch_container.py.

This file needs Docker with NVIDIA's container toolkit and Python 3.7 or newer, but neither gptlm nor torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[3]
BUILD = f"build one with docker build -t gptlm -f {ROOT}/docker/Dockerfile {ROOT}, then give --image gptlm"
OLDEST_PYTHON = (3, 11)
INFINIBAND = Path("/dev/infiniband")
PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
# modules of other frameworks that `gptlm launch` replaces, wherever a shell command begins
REPLACED = re.compile(
    r"(^|[;&|\n({]\s*)((?:\w+=\S+\s+)*)"
    r"(python[\d.]*\s+(?:-u\s+)?-m\s+(?:oneflow_gpt\.training|paddle\.distributed\.launch)(?!\S))"
)
NAME = re.compile(r"""^name\s*=\s*["']gptlm["']""", re.MULTILINE)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.exit(refusal(message))


def refusal(message: str, code: int = 2) -> int:
    print(f"launch_container.py: error: {message}", file=sys.stderr)
    return code


def note(message: str) -> None:
    print(f"launch_container.py: {message}", file=sys.stderr)


def parse(argv: list[str] | None = None) -> Any:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", help="image that contains gptlm, such as the one of docker/Dockerfile")
    parser.add_argument("--cmd", help="command line for a shell; unset: an interactive shell")
    parser.add_argument("--src", help="folder to mount; installed if it contains gptlm")
    parser.add_argument("--wheel", help="a wheel of gptlm to install; OneFlow's is replaced by the image's gptlm")
    parser.add_argument("--py", help="Python that the image must have; below 3.11 it is replaced by the image's")
    parser.add_argument("--extra-mount", "--extra_mount", help="another folder to mount; unset: /data if it exists")
    parser.add_argument("--proxy", help="URL of a proxy for HTTP and HTTPS")
    parser.add_argument("--no-interactive", "--no_interactive", action="store_true", help="without a terminal")
    arguments, rest = parser.parse_known_args(argv)
    for word in rest:
        if word.startswith("-"):
            parser.error(f"{word} is unknown; --help lists the flags")
        parser.error(f'unexpected argument {word!r}; a command with spaces needs quotes: --cmd "..."')
    if not arguments.image:
        parser.error(f"give --image IMAGE, a Docker image that contains gptlm; {BUILD}")
    if arguments.image.startswith("oneflow-manylinux"):
        parser.error(f"--image {arguments.image} contains no gptlm; {BUILD}")
    if arguments.no_interactive and not arguments.cmd:
        parser.error('--no-interactive needs --cmd "..."')
    for flag, folder in (("--extra-mount", arguments.extra_mount), ("--src", arguments.src)):
        if folder and not Path(folder).is_dir():
            parser.error(f"{flag} {folder} is not a folder")
    if arguments.py and not re.fullmatch(r"\d+(\.\d+){1,2}", arguments.py):
        parser.error(f"--py {arguments.py}: expected a version such as 3.12")
    if is_wheel_of_gptlm(arguments.wheel) and not Path(arguments.wheel).is_file():
        parser.error(f"--wheel {arguments.wheel} does not exist")
    return arguments


def is_wheel_of_gptlm(wheel: str | None) -> bool:
    return Path(wheel or "").name.startswith("gptlm-")


def contains_gptlm(folder: str | None) -> bool:
    project = Path(folder or "") / "pyproject.toml"
    return bool(folder) and project.is_file() and bool(NAME.search(project.read_text(encoding="utf-8")))


def container_command(arguments: Any) -> str:
    """What bash runs in the container: checks and installations, then the command."""
    steps, replaced = [], []
    python = tuple(map(int, (arguments.py or "0.0").split(".")[:2]))
    if python >= OLDEST_PYTHON:
        wanted = ".".join(map(str, python))
        check = f"import sys; have = '%d.%d' % sys.version_info[:2]; sys.exit(None if have == '{wanted}' else "
        check += f"'the image has Python ' + have + ', --py is {wanted}; leave --py out or take another image')"
        steps.append(f"python3 -c {shlex.quote(check)}")
    elif arguments.py:
        replaced.append(f"Python {arguments.py}")
    if is_wheel_of_gptlm(arguments.wheel):
        wheel = shlex.quote(os.path.abspath(arguments.wheel))
        steps.append(f"python3 -m pip install --quiet --force-reinstall --no-deps {wheel}")
    elif arguments.wheel:
        replaced.append(Path(arguments.wheel).name)
    if replaced:
        are = "are" if len(replaced) > 1 else "is"
        note(f"{' and '.join(replaced)} {are} replaced by what the image contains")
    if contains_gptlm(arguments.src):
        # without build isolation nothing is downloaded: the image has the packages that gptlm needs
        folder = shlex.quote(os.path.abspath(arguments.src))
        steps.append(f"python3 -m pip install --quiet --no-build-isolation --editable {folder}")
    missing = shlex.quote(f"image {arguments.image} contains no gptlm; {BUILD}")
    steps.append(f"{{ command -v gptlm >/dev/null || {{ echo {missing} >&2; false; }}; }}")
    command = REPLACED.sub(r"\1\2gptlm launch \3", arguments.cmd or "")
    if command != (arguments.cmd or ""):
        note("gptlm launch runs the training command")
    # a shell of its own becomes the command, which then gets the signals of Docker
    steps.append(f"exec bash -c {shlex.quote(command)}" if command else "exec bash")
    return " && ".join(steps)


def mounts(arguments: Any) -> list[str]:
    """Folders that the container sees under the same path, each once."""
    extra = arguments.extra_mount or ("/data" if Path("/data").is_dir() else None)
    wheel = str(Path(arguments.wheel).parent) if is_wheel_of_gptlm(arguments.wheel) else None
    folders = [os.path.abspath(folder) for folder in (os.getcwd(), extra, arguments.src, wheel) if folder]
    return list(dict.fromkeys(folders))


def docker_command(arguments: Any) -> list[str]:
    command = ["docker", "run", "--rm", "--init", "--gpus", "all", "--network", "host", "--ipc", "host"]
    command += ["--ulimit", "memlock=-1", "--workdir", os.getcwd()]
    if INFINIBAND.exists():
        command += ["--device", str(INFINIBAND)]
    if not arguments.no_interactive and sys.stdin.isatty() and sys.stdout.isatty():
        command += ["--interactive", "--tty"]
    for folder in mounts(arguments):
        command += ["--volume", f"{folder}:{folder}"]
    if arguments.proxy:
        for name in PROXIES:
            command += ["--env", f"{name}={arguments.proxy}"]
    return [*command, arguments.image, "bash", "-c", container_command(arguments)]


def main() -> int:
    command = docker_command(parse())
    print(" ".join(map(shlex.quote, command)), flush=True)
    if not shutil.which("docker"):
        return refusal("docker is not installed here; install Docker with NVIDIA's container toolkit", 1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
