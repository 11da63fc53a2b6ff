"""OneFlow's GPT page, command by command, in small form."""

import ast
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from gptlm.cli import main
from tests.conftest import ROOT

PAGE = ROOT / "scripts" / "oneflow"  # in this folder the commands work as typed
NAMES = sorted(file.name.removesuffix(".yaml") for file in (resources.files("gptlm") / "configs/oneflow").iterdir())
TRAINING = " ".join(
    """python3 -m oneflow_gpt.training
    --dataset gpt_sample_dataset_text_document --seq-length 1024 --num-layers 24 --hidden-size 1024
    --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 8 --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1 --num-gpus-per-node 1 --train-iters 500000 --learning-rate 0.00015 --min-lr 1.0e-5
    --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction 0.01 --initial-loss-scale 4294967296
    --optimizer adamw --weight-decay 1e-2 --clip-grad 1.0 --vocab-size 50257 --split 949,50,1 --load checkpoint
    --save checkpoint --save-interval 10000 --log-interval 100 --checkpoint-activations --multihead-attention-fusion
    --fp16""".split()
)
WHEEL = "oneflow-0.3.5+cu112.git.75f11b825-cp37-cp37m-manylinux2014_x86_64.whl"
OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
DOCKER_THAT_PRINTS = '#!/bin/bash\nprintf "<%s>" "$@"\n'
DOCKER_THAT_RUNS = '#!/bin/bash\nexec bash -c "${@: -1}"\n'

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 512"
STEPS = "--train-iters 2 --log-interval 1 --split 80,10,10 --device cpu --attention-dropout 0 --hidden-dropout 0"


def environment(**more: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**clean, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src"), **more}


def start(words: list[str], folder: Path) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def write_corpus(folder: Path) -> None:
    """my-corpus.json and GPT-2's two vocabulary files, small ones."""
    rows = [{"src": "The Internet", "text": "jumps over the lazy dog", "type": "Eng", "id": str(n)} for n in range(300)]
    (folder / "my-corpus.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = ["--input_path", "my-corpus.json", "--output_dir", "tokenizer", "--vocab_size", "300"]
    assert main(["tokenizer", *trained]) == 0
    for name in ("vocab.json", "merges.txt"):
        (folder / f"gpt2-{name}").write_bytes((folder / "tokenizer" / name).read_bytes())


def test_the_page_from_top_to_bottom_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    small = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --device cpu --fp16 false"
    for steps in (2, 4):  # the second time the run resumes
        more = f"{small} --train-iters {steps}".split()
        data = """--input my-corpus.json --output-prefix gpt_sample_dataset --vocab gpt2-vocab.json --dataset-impl mmap
            --tokenizer-type GPT2BPETokenizer --merge-file gpt2-merges.txt --append-eod""".split()
        assert main(["preprocess", *data]) == 0
        assert (tmp_path / "gpt_sample_dataset_text_document.bin").is_file()
        assert main(["pretrain", *example("pretrain_345M", folder=tmp_path), *more]) == 0
        assert json.loads((tmp_path / "checkpoint" / "trainer_state.json").read_text())["global_step"] == steps
        assert main(["pretrain", *TRAINING.split()[3:], *more]) == 0  # the same folder and steps: nothing is left to do
        assert json.loads((tmp_path / "checkpoint" / "trainer_state.json").read_text())["global_step"] == steps


@pytest.mark.distributed
def test_the_container_command_trains(corpus_folder, tmp_path):
    """Docker is replaced by a shell: the checks and the command run, as they would in an image."""
    data = next((corpus_folder / "mmap").glob("*.bin")).with_suffix("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(DOCKER_THAT_RUNS)
    (tmp_path / "bin" / "gptlm").write_text(f'#!/bin/bash\nexec "{sys.executable}" -m gptlm "$@"\n')
    for name in ("docker", "gptlm"):
        (tmp_path / "bin" / name).chmod(0o755)
    small = f"{SIZES} {STEPS} --dataset {data} --fp16 false"
    words = ["--src", str(tmp_path), "--py", "3.7", "--image", "gptlm", "--wheel", WHEEL]
    done = subprocess.run(
        [sys.executable, str(PAGE / "tools" / "launch_container.py"), *words, "--cmd", f"{TRAINING} {small}"],
        cwd=tmp_path,
        env=environment(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--nproc_per_node 1 -m gptlm pretrain" in done.stderr
    assert json.loads((tmp_path / "checkpoint" / "trainer_state.json").read_text())["global_step"] == 2


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.distributed
def test_two_nodes_whose_ranks_are_given(corpus_folder, tmp_path):
    """Both addresses belong to this machine, so the commands name their ranks: before the module, and as the script."""
    data = next((corpus_folder / "mmap").glob("*.bin")).with_suffix("")
    nodes = f"--num-nodes 2 --node-ips 127.0.0.1,127.0.0.1 --ctrl-port {free_port()} --micro-batch-size 4"
    training = f"{SIZES} {STEPS} {nodes} --global-batch-size 8 --dataset {data} --save {tmp_path}/out".split()
    scripts = ROOT / "scripts"
    launched = [str(scripts / "launch.py"), "--rank", "0", "python3", "-m", "oneflow_gpt.training", *training]
    plain = [str(scripts / "run_pretrain.py"), *training, "--rank", "1"]
    started = [
        start([sys.executable, *words], tmp_path / f"node{rank}") for rank, words in enumerate((launched, plain))
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "node 1 of 2 connects to the others at 127.0.0.1:" in outputs[1]
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 2


def launch_container(here: Path, *words: str, docker: str | None = DOCKER_THAT_PRINTS) -> subprocess.CompletedProcess:
    (here / "bin").mkdir(exist_ok=True)
    for name, path in {"bash": "/bin/bash", "python3": sys.executable}.items():
        if not (here / "bin" / name).exists():
            (here / "bin" / name).symlink_to(path)
    if docker:
        (here / "bin" / "docker").write_text(docker)
        (here / "bin" / "docker").chmod(0o755)
    script = str(PAGE / "tools" / "launch_container.py")
    path = {"PATH": str(here / "bin")}
    return subprocess.run(
        [sys.executable, script, *words], cwd=here, env=path, capture_output=True, text=True, timeout=30
    )


def test_the_container_command_of_the_page(tmp_path):
    """As typed, with an image that contains gptlm."""
    words = ["--src", str(tmp_path), "--py", "3.7", "--image", "gptlm", "--wheel", WHEEL, "--cmd", TRAINING]
    result = launch_container(tmp_path, *words)
    assert result.returncode == 0, result.stderr
    line, arguments = result.stdout.splitlines()[0], result.stdout.split("\n<", 1)[1]
    assert line.startswith("docker run --rm --init --gpus all --network host --ipc host ")
    assert arguments.split("><").count(f"{tmp_path}:{tmp_path}") == 1 and "pip install" not in arguments
    inside = arguments.split("><")[-1].rstrip(">\n")
    checks, _, command = inside.partition(" && exec bash -c ")
    assert shlex.split(command) == [f"gptlm launch {TRAINING}"] and "command -v gptlm" in checks
    noted = f"launch_container.py: Python 3.7 and {WHEEL} are replaced by what the image contains"
    assert result.stderr.splitlines() == [noted, "launch_container.py: gptlm launch runs the training command"]


def test_what_is_mounted_and_installed(tmp_path):
    wheel = tmp_path / "my wheels" / "gptlm-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    here = tmp_path / "here"
    here.mkdir()
    words = ["--src", str(ROOT), "--py", "3.12", "--image", "i", "--wheel", str(wheel), "--proxy=http://p:1"]
    given = launch_container(here, *words, "--cmd", "A=1 gptlm plan; python -m paddle.distributed.launch x.py").stdout
    assert "<https_proxy=http://p:1>" in given and f"<{ROOT}:{ROOT}>" in given and "<--tty>" not in given
    assert f"<{wheel.parent}:{wheel.parent}>" in given
    inside = given.split("><")[-1].rstrip(">\n")
    *steps, _, last = inside.split(" && ")
    assert shlex.split(steps[0])[:2] == ["python3", "-c"] and "have == '3.12'" in shlex.split(steps[0])[2]
    installed = ["--force-reinstall", "--no-deps", str(wheel)]
    assert shlex.split(steps[1]) == [*"python3 -m pip install --quiet".split(), *installed]
    assert shlex.split(steps[2])[-3:] == ["--no-build-isolation", "--editable", str(ROOT)]
    command = "A=1 gptlm plan; gptlm launch python -m paddle.distributed.launch x.py"
    assert shlex.split(last) == ["exec", "bash", "-c", command]


@pytest.mark.parametrize(
    ("words", "docker", "code", "message"),
    [
        (["--image", "i", "--cmd", "true"], None, 1, "docker is not installed here"),
        (["--cmd", "true"], DOCKER_THAT_PRINTS, 2, "give --image IMAGE, a Docker image that contains gptlm; build one"),
        (["--image", "oneflow-manylinux2014-cuda11.2:0.1"], DOCKER_THAT_PRINTS, 2, "contains no gptlm; build one with"),
        (["--image", "i", "--extra-mount", "nowhere"], DOCKER_THAT_PRINTS, 2, "--extra-mount nowhere is not a folder"),
        (["--image", "i", "--src", "nowhere"], DOCKER_THAT_PRINTS, 2, "--src nowhere is not a folder"),
        (["--image", "i", "--wheel", "gptlm-9.whl"], DOCKER_THAT_PRINTS, 2, "--wheel gptlm-9.whl does not exist"),
        (["--image", "i", "--py", "three"], DOCKER_THAT_PRINTS, 2, "--py three: expected a version"),
        (["--image", "i", "--no-interactive"], DOCKER_THAT_PRINTS, 2, "--no-interactive needs --cmd"),
        (["--imagine", "i"], DOCKER_THAT_PRINTS, 2, "--imagine is unknown"),
        (["--image"], DOCKER_THAT_PRINTS, 2, "--image: expected one argument"),
        (["--image", "i", "true"], DOCKER_THAT_PRINTS, 2, "unexpected argument 'true'"),
        (["--image", "i", "--cmd", "true"], DOCKER_THAT_RUNS, 1, "image i contains no gptlm; build one with"),
        (["--image", "i", "--py", OWN_PYTHON, "--cmd", "true"], DOCKER_THAT_RUNS, 1, "image i contains no gptlm"),
        (["--image", "i", "--py", "4.0", "--cmd", "true"], DOCKER_THAT_RUNS, 1, "the image has Python 3."),
    ],
)
def test_refused_container_commands(tmp_path, words, docker, code, message):
    result = launch_container(tmp_path, *words, docker=docker)
    assert result.returncode == code and message in result.stderr, result.stderr


def test_the_container_script_runs_on_old_hosts():
    text = (PAGE / "tools" / "launch_container.py").read_text()
    tree = ast.parse(text, feature_version=(3, 7))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"__future__", "argparse", "os", "pathlib", "re", "shlex", "shutil", "sys", "typing"}


def test_commands_of_the_page_in_their_folder():
    for words, said in ((TRAINING.split()[1:], '"num_hidden_layers": 24'), (["tools/preprocess_data.py"], "--append")):
        more = "--help" if said.startswith("--") else "--print_config"
        done = subprocess.run(
            [sys.executable, *words, more], cwd=PAGE, env=environment(), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and said in done.stdout, done.stderr


def test_what_the_dockerfile_copies_and_installs():
    text = (ROOT / "docker" / "Dockerfile").read_text()
    kept = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, flags=re.M) for name in line.split()]
    assert copied and all((ROOT / name).exists() and f"!{name}" in kept for name in copied)
    extras = re.search(r'"\.\[(.*)\]"', text)[1].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])
    assert {"README.md", "LICENSE", "pyproject.toml", "src"} <= set(copied)  # what building gptlm reads
    oldest = tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    assert tuple(map(int, re.search(r"PYTHON_VERSION=([\d.]+)", text)[1].split("."))) >= oldest


def example(name: str, *flags: str, folder: Path, **variables: str) -> list[str]:
    """The arguments that a script of examples/ passes to run_pretrain.py."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ONEFLOW_")}
    done = subprocess.run(
        ["bash", str(PAGE / "example" / f"{name}.sh"), *flags],
        cwd=folder,
        env={**clean, "PYTHON": "echo", **variables},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    script, *words = shlex.split(done.stdout)
    assert Path(script).resolve() == ROOT / "scripts" / "run_pretrain.py"
    return words


@pytest.mark.parametrize("name", NAMES)
def test_the_example_scripts(name, tmp_path, capsys):
    assert (PAGE / "examples" / f"{name}.sh").is_file()
    if name.endswith("_with_container"):
        return
    addresses = {"ONEFLOW_GPT_NODE_IPS": "a,b,c,d" if "4n8d" in name else "a,b"} if "distribute" in name else {}
    words = example(name, "--seed", "5", folder=tmp_path, ONEFLOW_GPT_DATASET="my/data", **addresses)
    assert words[:2] == ["-c", name] and words[-2:] == ["--seed", "5"]
    assert main(["pretrain", *words, "--print_config"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["from"]["input_dir"] == "--dataset" and found["run"]["input_dir"] == "my/data"


def test_the_data_of_the_example_scripts(tmp_path):
    assert "--dataset" not in example("pretrain_345M", folder=tmp_path)
    (tmp_path / "gpt_sample_dataset_text_document.idx").touch()
    assert example("pretrain_345M", folder=tmp_path)[2:] == ["--dataset", "gpt_sample_dataset_text_document"]
    assert example("pretrain_345M", "--dataset=x", folder=tmp_path)[2:] == ["--dataset=x"]
    names = {"ONEFLOW_GPT_LOAD_PATH": "in", "ONEFLOW_GPT_INIT_LOSS_SCALE": "2", "ONEFLOW_GPT_DATASET": "a b"}
    words = " ".join(example("pretrain_117M", folder=tmp_path, **names))
    for said in ("--load in", "--initial-loss-scale 2", "--dataset a b"):
        assert said in words


def test_the_container_script_quotes_its_command(tmp_path):
    (tmp_path / "docker").write_text(DOCKER_THAT_PRINTS)
    (tmp_path / "docker").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(PAGE / "examples" / "pretrain_with_container.sh"), "--train-iters", "5"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "ONEFLOW_GPT_DATASET": "my data", "ONEFLOW_DEV_IMAGE": "mine:2"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    *_, image, bash, option, inside = done.stdout.split("\n<", 1)[1].rstrip(">\n").split("><")
    assert (image, bash, option) == ("mine:2", "bash", "-c")
    command = shlex.split(inside.partition(" && exec bash -c ")[2])[0]
    wanted = "gptlm pretrain -c pretrain_with_container --dataset".split()
    assert shlex.split(command) == [*wanted, "my data", "--train-iters", "5"]
