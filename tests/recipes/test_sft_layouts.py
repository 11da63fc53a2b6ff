"""Fine-tuning with tensor parallelism, whole models and adapters, trains, evaluates and resumes like one process.

All runs of two and of four processes happen in one launched session each; the tests look at what they left.
"""

import json
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from gptlm.checkpoint.folder import read
from gptlm.commands.sft import parse_sft
from gptlm.inference.loading import load_for_inference
from gptlm.model.tokenizer import load_tokenizer
from gptlm.recipes.sft.run import sft
from tests.checkpoint.made import assert_same_tensors
from tests.recipes.test_sft import BASE, NO_DROPOUT, ROWS, examples  # noqa: F401 - a fixture
from tests.recipes.test_sft import model as even_model  # noqa: F401 - a fixture
from tests.recipes.test_sft_distributed import nine_examples
from tests.recipes.test_sharding import losses, norms, run_session

pytestmark = pytest.mark.distributed
TP = ["--tensor_parallel_degree", 2]
SP = [*TP, "--sequence_parallel", 1]
KINDS = {"whole": [], "lora": ["--lora"]}
TWO = {
    "tp2": TP,
    "tp2 sp": [*SP, "--recompute", 1],
    "tp2 stage2": [*TP, "--sharding", "stage2"],
    "tp2 stage3": [*TP, "--sharding", "stage3"],
    "tp2 sp stage3": [*SP, "--sharding", "stage3"],
}
FOUR = {
    "tp2 dp2": TP,
    "tp2 sp dp2 stage1": [*SP, "--sharding", "stage1"],
    "tp2 dp2 stage2": [*TP, "--sharding", "stage2"],
    "tp2 sp dp2 stage3": [*SP, "--sharding", "stage3"],
    "tp4": ["--tensor_parallel_degree", 4],
}
PREDICTIONS = "predictions/eval-step-6.jsonl"
HALF = ["--bf16", "--fp16_opt_level", "O2"]
ADAPTERS = ["--lora", "--lora_rank", 4, "--use_rslora", "--init_lora_weights", "gaussian"]
ADAPTERS += ["--lora_rank_pattern", '{"c_fc": 2}', "--lora_alpha_pattern", '{"attn.c_proj": 3}']
DROPOUT = ["--hidden_dropout_prob", 0.2, "--attention_probs_dropout_prob", 0.2, "--lora_dropout", 0.2]
VARIANTS = {  # what one process does, too
    "grouped": ["--group_by_length", "--pad_to_multiple_of", 8],
    "compat": ["--paddle_compat"],
    "packed": ["--zero_padding"],
    "packed lora": ["--zero_padding", "--lora"],
    "adapters": ADAPTERS,
    "best": ["--lora", "--load_best_model_at_end"],
}


@pytest.fixture(scope="module")
def model(even_model, tmp_path_factory):  # noqa: F811
    """A folder as in test_sft.py, of a vocabulary that does not divide, with four heads."""
    folder = shutil.copytree(even_model, tmp_path_factory.mktemp("sft-layouts") / "my 模型")
    torch.manual_seed(5)
    entries = len(load_tokenizer(str(folder))) | 1
    sizes = {"vocab_size": entries, "n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 4}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def words(model, examples):  # noqa: F811
    data = ["--model_name_or_path", model, "--dataset_name_or_path", examples, "--do_eval", "--generate_num", 3]
    return [*BASE, *NO_DROPOUT, *data, "--tgt_length", 8]


@pytest.fixture(scope="module")
def alone(words, tmp_path_factory):
    """The same in one process: a folder, with what it logged."""
    found = {}

    def run(*more):
        if more not in found:
            folder = tmp_path_factory.mktemp("alone")
            metrics = sft(parse_sft([str(word) for word in [*words, *more, "--output_dir", folder]], {}))
            history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
            found[more] = {"metrics": metrics, "history": history, "folder": folder}
        return found[more]

    return run


@pytest.fixture(scope="module")
def two(words, alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    cases = [(f"{name} {kind}", [*TWO[name], *more]) for name in TWO for kind, more in KINDS.items()]
    cases += [(f"tp2 {name}", [*TP, *more]) for name, more in VARIANTS.items()]
    cases.append(("tp2 sp packed", [*SP, "--zero_padding"]))
    cases += [(f"tp2 half {kind}", [*SP, *HALF, *more]) for kind, more in KINDS.items()]
    cases.append(("tp2 nine", [*SP, *nine_examples(folder), "--per_device_train_batch_size", 2]))
    cases[-1][1].extend(["--gradient_accumulation_steps", 2])
    cases.append(("tp2 sp compiled", [*SP, "--lora", "--torch_compile"]))
    for kind, more in KINDS.items():
        for saved, start in ((f"tp2 {kind}", folder / f"tp2 {kind}"), (f"one {kind}", alone(*more)["folder"])):
            cases.append((f"{saved} again", [*TP, *more, "--resume_from_checkpoint", start / "checkpoint-3"]))
        dropout = [*SP, *more, *DROPOUT[: None if more else 4]]
        cases.append((f"tp2 dropout {kind}", dropout))
        start = folder / f"tp2 dropout {kind}" / "checkpoint-3"
        cases.append((f"tp2 dropout {kind} again", [*dropout, "--resume_from_checkpoint", start]))
    start = alone("--lora")["folder"]
    cases.append(("tp2 continued", [*TP, "--lora_path", start, "--merge_weights"]))
    cases.append(("tp2 sharded", [*TP, "--checkpoint_format", "sharded", "--async_save"]))
    for kind in KINDS:
        cases.append((f"evaluated {kind}", [*SP, "--do_train", 0, "--output_dir", folder / f"tp2 {kind}"]))
    cases.append(("added tokens", [*TP, "--additional_special_tokens", "<user>"]))
    cases.append(("added tokens lora", [*TP, "--lora", "--additional_special_tokens", "<user>"]))
    return folder, run_session(2, [in_folder(words, folder, *case) for case in cases], folder)


def in_folder(words, folder, name, more):
    own = [] if "--output_dir" in more else ["--output_dir", folder / name]
    return name, [*words, *own, *more]


def check(session, wanted, name, tolerance=1e-5):
    """The run of several processes is that of one: losses, norms, final weights, metrics and generated texts."""
    folder, results = session
    found, ours, theirs = results[name], folder / name, wanted["folder"]
    assert losses(found) == pytest.approx(losses(wanted), abs=tolerance)
    assert norms(found) == pytest.approx(norms(wanted), abs=tolerance, rel=tolerance)
    for key in ("eval_loss", "eval_accuracy", "eval_bleu4", "eval_rougel"):
        assert found["metrics"][key] == pytest.approx(wanted["metrics"][key], abs=tolerance), key
    assert (ours / PREDICTIONS).read_text() == (theirs / PREDICTIONS).read_text()
    file = "adapter_model.safetensors" if (theirs / "adapter_config.json").exists() else "model.safetensors"
    one, several = load_file(theirs / file), load_file(ours / file)
    assert one.keys() == several.keys()
    for key, value in one.items():  # AdamW's first steps divide tiny gradients by their own size
        torch.testing.assert_close(several[key], value, atol=2e-4, rtol=0)
    for file in ("config.json", "generation_config.json"):
        if (theirs / file).exists():
            assert json.loads((ours / file).read_text()) == json.loads((theirs / file).read_text())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TWO)
def test_two_processes_fine_tune_like_one(two, alone, name, kind):
    check(two, alone(*KINDS[kind]), f"{name} {kind}")


@pytest.mark.parametrize("name", VARIANTS)
def test_data_and_adapters_of_every_form(two, alone, name):
    check(two, alone(*VARIANTS[name]), f"tp2 {name}")


def test_packed_rows_whose_tokens_are_split(two, alone):
    check(two, alone("--zero_padding"), "tp2 sp packed")


def test_batches_that_are_filled_up(two, alone, tmp_path):
    """Steps of 4, 4 and 1 examples; the last one has a micro-batch without any."""
    batch = ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2]
    check(two, alone(*nine_examples(tmp_path), *batch), "tp2 nine")


def test_compiled_blocks_train_alike(two):
    folder, results = two
    assert losses(results["tp2 sp compiled"]) == pytest.approx(losses(results["tp2 lora"]), abs=1e-5)
    assert norms(results["tp2 sp compiled"]) == pytest.approx(norms(results["tp2 lora"]), abs=1e-5)
    assert (folder / "log.txt").read_text().count("blocks and loss are compiled") == 1


def test_half_precision(two, alone):
    folder, results = two
    for kind, more in KINDS.items():
        wanted = alone(*HALF, *more)
        assert losses(results[f"tp2 half {kind}"]) == pytest.approx(losses(wanted), abs=3e-2)
        assert norms(results[f"tp2 half {kind}"]) == pytest.approx(norms(wanted), rel=3e-2)
    stored = load_file(folder / "tp2 half lora" / "adapter_model.safetensors")
    assert all(value.dtype == torch.bfloat16 for value in stored.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_resumes_in_both_directions(two, words, alone, kind):
    folder, results = two
    name = f"tp2 {kind}"
    assert losses(results[f"{name} again"]) == losses(results[name])
    for file in (folder / name / "checkpoint-6").glob("*.safetensors"):
        again = load_file(folder / f"{name} again" / "checkpoint-6" / file.name)
        assert all(torch.equal(again[key], value) for key, value in load_file(file).items()), file
    check(two, alone(*KINDS[kind]), f"one {kind} again")
    assert read(folder / name / "checkpoint-3").manifest.layout == [2, 1, 1]
    back = alone(*KINDS[kind], "--resume_from_checkpoint", folder / name / "checkpoint-3")
    assert losses(back)[-3:] == pytest.approx(losses(results[name])[-3:], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_resumes_exactly(two, kind):
    name, results = f"tp2 dropout {kind}", two[1]
    assert losses(results[f"{name} again"]) == losses(results[name])
    assert losses(results[name]) != pytest.approx(losses(results[f"tp2 {kind}"]), abs=1e-3)  # there was dropout


def test_stock_peft_computes_what_we_do(two, model):
    """The saved adapters on stock GPT-2, the same merged by us, and the adapters that training went on with."""
    folder, ids = two[0], torch.arange(40)[None]
    for name in ("tp2 lora", "tp2 sp lora", "tp2 sp stage3 lora", "tp2 adapters", "tp2 continued"):
        stock = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder / name).eval()
        ours, _ = load_for_inference(str(model), lora_path=str(folder / name))
        with torch.no_grad():
            wanted, found = stock(ids).logits, ours(ids).logits
            base = AutoModelForCausalLM.from_pretrained(model).eval()(ids).logits
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        assert (wanted - base).abs().max() > 0.01
    merged = AutoModelForCausalLM.from_pretrained(folder / "tp2 continued" / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, wanted, atol=1e-5, rtol=1e-5)


def test_training_continues_with_adapters_of_one_process(two, alone):
    start = alone("--lora")["folder"]
    check(two, alone("--lora_path", start), "tp2 continued")


def test_shards_hold_what_one_process_writes(two):
    folder, results = two
    assert losses(results["tp2 sharded"]) == losses(results["tp2 whole"])
    for step in (3, 6):
        steps = (folder / name / f"checkpoint-{step}" for name in ("tp2 whole", "tp2 sharded"))
        assert_same_tensors(*steps)


@pytest.mark.parametrize("kind", KINDS)
def test_the_trained_model_is_evaluated_alone(two, kind):
    trained, evaluated = (two[1][name]["metrics"] for name in (f"tp2 {kind}", f"evaluated {kind}"))
    for key in ("eval_loss", "eval_accuracy", "eval_bleu4"):
        assert evaluated[key] == pytest.approx(trained[key], abs=1e-6), key


def test_tokens_are_added_to_whole_models_only(two):
    folder, results = two
    assert len(losses(results["added tokens"])) == 6
    trained = AutoModelForCausalLM.from_pretrained(folder / "added tokens")
    assert trained.config.vocab_size == len(load_tokenizer(str(folder / "added tokens")))
    assert "1 tokens are added to the vocabulary" in results["added tokens lora"]["error"]
    assert "use --sharding stage2 with --tensor_parallel_degree 1" in results["added tokens lora"]["error"]


def test_the_share_of_the_adapters_is_that_of_one_process(two):
    said = [line for line in (two[0] / "log.txt").read_text().splitlines() if "parameters are trained" in line]
    assert len({line.partition("adapters: ")[2] for line in said}) == 2  # another rank in "adapters"


@pytest.fixture(scope="module")
def four(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    cases = [
        (f"{name} {kind}", [*words, *FOUR[name], *more, "--output_dir", folder / f"{name} {kind}"])
        for name in FOUR
        for kind, more in KINDS.items()
    ]
    batch = {"tp4": 4}
    sized = [(name, [*case, "--per_device_train_batch_size", batch.get(name[:3], 2)]) for name, case in cases]
    return folder, run_session(4, sized, folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FOUR)
def test_four_processes_fine_tune_like_one(four, alone, name, kind):
    check(four, alone(*KINDS[kind]), f"{name} {kind}")


def test_there_are_rows_of_several_lengths():
    assert len({len(row["tgt"]) for row in ROWS}) > 3
