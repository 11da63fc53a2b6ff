"""PaddleNLP's GPT page: its commands as typed, from top to bottom, twice, in one folder.

Folders with the names of the built-in models stand for those; appended words make the runs short.
"""

import json
import re
import shlex
import socket

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from gptlm.cli import main
from gptlm.model.hub_datasets import hub_dataset
from gptlm.model.tokenizer import train_tokenizer
from tests.conftest import write_tokens

PRETRAIN = r"""
task_name="gpt3_hybrid"
python -u  -m paddle.distributed.launch \
    --gpus "0,1,2,3,4,5,6,7" \
    --log_dir ${log_dir} \
    run_pretrain.py \
    --model_name_or_path gpt2-medium-en \
    --tokenizer_name_or_path gpt2-medium-en \
    --input_dir "./data" \
    --output_dir "output/$task_name" \
    --split 949,50,1 \
    --max_seq_length 1024 \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --tensor_parallel_degree 1 \
    --pipeline_parallel_degree 1 \
    --sequence_parallel 0 \
    --fuse_attention_qkv 0 \
    --use_flash_attention 0 \
    --fp16  \
    --fp16_opt_level "O2"  \
    --scale_loss 1024 \
    --learning_rate 0.00001 \
    --min_learning_rate 0.000005 \
    --max_steps 10000 \
    --save_steps 5000 \
    --weight_decay 0.01 \
    --warmup_ratio 0.01 \
    --max_grad_norm 1.0 \
    --logging_steps 1\
    --continue_training \
    --dataloader_num_workers 1 \
    --sharding "stage2" \
    --eval_steps 1000 \
    --report_to "visualdl" \
    --disable_tqdm true \
    --recompute 1 \
    --gradient_accumulation_steps 2 \
    --do_train \
    --do_eval \
    --device "gpu"
"""
FINE_TUNE = r"""
    --model_name_or_path gpt2-medium-en \
    --output_dir "output/$task_name" \
    --per_device_train_batch_size 2 \
    --per_device_eval_batch_size 1 \
    --tensor_parallel_degree 1 \
    --pipeline_parallel_degree 1 \
    --sequence_parallel 0 \
    --fp16  \
    --fp16_opt_level "O2"  \
    --scale_loss 1024 \
    --learning_rate RATE \
    --max_steps 10000 \
    --save_steps 5000 \
    --weight_decay 0.01 \
    --warmup_ratio 0.01 \
    --max_grad_norm 1.0 \
    --logging_steps 1\
    --dataloader_num_workers 1 \
    --sharding "stage2" \
    --eval_steps 1000 \
    --report_to "visualdl" \
    --disable_tqdm true \
    --recompute 1 \
    --gradient_accumulation_steps 2 \
    --do_train \
    --do_eval \
    --device "gpu" \
"""
LAUNCHED = 'python -u -m paddle.distributed.launch --gpus "0" --log_dir ${log_dir} finetune_generation.py '
SFT = LAUNCHED + FINE_TUNE.replace("RATE", "0.00001")
LORA = "python finetune_generation.py " + FINE_TUNE.replace("RATE", "3e-4") + "--lora"
PREDICT = "python predict_generation.py"
COMMANDS = {"run_pretrain.py": "pretrain", "finetune_generation.py": "sft", "predict_generation.py": "predict"}
SHORT = "--max_steps 4 --save_steps 2 --eval_steps 2 --device cpu".split()
SHORT_SFT = [*SHORT, "--generate_num", "2"]
RECORDS = {  # of the hub's squad
    "id": [str(number) for number in range(12)],
    "title": ["t"] * 12,
    "context": [f"the cat {word} sat on the mat" for word in "abcdefghijkl"],
    "question": [f"who sat {word} ?" for word in "abcdefghijkl"],
    "answers": [{"text": ["the cat"], "answer_start": [0]}] * 12,
}


def words_of(text):
    """`gptlm` words of a command of the page; the launcher's are left out."""
    words = shlex.split(text.replace("$task_name", "gpt3_hybrid").replace("\\\n", " "))
    at = next(place for place, word in enumerate(words) if word in COMMANDS)
    return [COMMANDS[words[at]], *words[at + 1 :]]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The reader's folder: models under the names of the page, the page's data, and squad."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tables = datasets.Dataset.from_dict(RECORDS)
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: {"squad": tables}[name])
    tokenizer = train_tokenizer([" ".join(RECORDS["context"])] * 5, 330)
    torch.manual_seed(5)
    sizes = {"n_positions": 1024, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    network = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes))
    for name in ("gpt2-medium-en", "gpt-cpm-large-cn"):
        tokenizer.save_pretrained(tmp_path / name)
        network.save_pretrained(tmp_path / name)
    write_tokens(tmp_path / "data" / "gpt_en_dataset_300m", layout="npy", documents=900, vocab_size=len(tokenizer))
    return tmp_path


def losses_in(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def weights_in(folder):
    """Bytes of each tensor; the order in a file of adapters depends on the process."""
    files = {path: load_file(path) for path in folder.rglob("*.safetensors") if not path.name.startswith("optimizer")}
    return {
        (str(path.relative_to(folder)), name): value.numpy().tobytes()
        for path, found in files.items()
        for name, value in found.items()
    }


def test_the_page_from_top_to_bottom_twice(folder, capsys):
    output = folder / "output" / "gpt3_hybrid"
    kept = {}
    for start in ("first", "second"):
        for text, place, name in ((PRETRAIN, ".", "model"), (SFT, "sft", "model"), (LORA, "lora", "adapter_model")):
            assert main([*words_of(text), *(SHORT if text == PRETRAIN else SHORT_SFT)]) == 0
            log = capsys.readouterr().out
            assert ("nothing to train" in log) == (start == "second"), log
            assert ("holds a run of pretraining: this one, " in log) == (place != ".")
            assert ("weights from gpt2-medium-en" in log) == (start == "first")
            assert f"results and logs are in {(output / place).relative_to(folder)}" in log
            assert (output / place / f"{name}.safetensors").is_file() and len(losses_in(output / place)) == 4
        assert main(words_of(PREDICT)) == 0
        assert len(capsys.readouterr().out.splitlines()) >= 2
        found = weights_in(output)
        assert found == (kept or found)
        kept = found

    # each is what it would be in a folder of its own
    for text, place in ((SFT, "sft"), (LORA, "lora")):
        alone = folder / f"{place} alone"
        assert main([*words_of(text), *SHORT_SFT, "--output_dir", str(alone)]) == 0
        assert losses_in(output / place) == losses_in(alone)
        assert weights_in(output / place) == weights_in(alone)

    # what the reader does next with the folder of the page
    capsys.readouterr()
    assert main(["merge-lora", "--lora_path", "output/gpt3_hybrid", "--output_path", "merged"]) == 0
    assert AutoModelForCausalLM.from_pretrained(folder / "merged").config.n_positions == 1024
    assert main("predict --model_name_or_path output/gpt3_hybrid --prompt cat --tgt_length 2 --device cpu".split()) == 0
    assert "other tasks have theirs in output/gpt3_hybrid/sft, output/gpt3_hybrid/lora" in capsys.readouterr().err
    assert main("sft --output_dir output/gpt3_hybrid --do_eval --device cpu".split()) == 0
    assert "the model trained in output/gpt3_hybrid/sft is evaluated" in capsys.readouterr().out
    assert main([*words_of(SFT), *SHORT_SFT, "--resume_from_checkpoint", "output/gpt3_hybrid/checkpoint-4"]) == 1
    said = capsys.readouterr().err
    assert (
        "is of pretraining, this run is fine-tuning: it cannot be resumed; to start from its weights give --mod" in said
    )
    assert main([*words_of(SFT), *SHORT_SFT, "--max_steps", "5", "--resume_from_checkpoint", "output/gpt3_hybrid"]) == 0
    assert "resuming from output/gpt3_hybrid/sft/checkpoint-4: step 4" in capsys.readouterr().out
    assert main([*words_of(SFT), *SHORT_SFT, "--overwrite_output_dir"]) == 0
    assert weights_in(output) == kept


@pytest.fixture
def attempts(monkeypatch, tmp_path, request):
    """A machine without network: every look-up of a host is counted and fails."""
    made = []

    def look_up(host, *arguments, **more):
        made.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    hub = re.sub(r"\W", "-", f"hub-{request.node.name}") + ".invalid"  # a process tries each host once
    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"https://{hub}")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", f"https://{hub}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return made


@pytest.mark.parametrize("text", [PRETRAIN, SFT, LORA, PREDICT], ids=["pretrain", "sft", "lora", "predict"])
def test_without_network_a_command_tries_once(tmp_path, monkeypatch, attempts, capsys, text):
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "data" / "gpt_en_dataset_300m", layout="npy", documents=900)
    assert main([*words_of(text), *(SHORT if text != PREDICT else ())]) == 1
    said = capsys.readouterr().err
    assert len(attempts) == 1 and "no connection to hub-" in said and "run `hf download " in said


def test_without_network_a_dataset_is_tried_once(attempts, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(
        Exception, match="squad is neither on this machine nor .*no connection to hub-.*give --dataset_n"
    ):
        hub_dataset("squad", "train")
    assert len(attempts) == 1
