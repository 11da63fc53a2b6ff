"""Tensor, pipeline and sequence parallelism against an independent single-process loop on stock GPT-2.

And tensor parallelism against DeepSpeed's own, AutoTP, on stock GPT-2.

All runs of two and of four processes happen in one launched session each; the tests look at what they left.
"""

import json
import math
import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from gptlm.checkpoint.folder import read
from gptlm.data.collate import documents_in
from gptlm.model.build import load_model
from tests.checkpoint.made import assert_same_tensors
from tests.recipes.test_pretrain import reference_batches, reference_run
from tests.recipes.test_sharding import NO_DROPOUT, NO_EVAL, ONLY_TRAINED, launch, losses, norms, run_session

STEPS, SAVED = 4, 2
BASE = (
    f"--max_seq_length 16 --max_steps {STEPS} --eval_iters 2 --logging_steps 1 --save_steps {SAVED} "
    f"--eval_steps {SAVED} --learning_rate 1e-2 --min_learning_rate 1e-3 --warmup_steps 2 --decay_steps 6 "
    "--weight_decay 0.1 --split 80,10,10 --do_train --do_eval --device cpu --disable_tqdm --report_to none "
    "--continue_training --global_batch_size 8"
).split()
TP, PP = "--tensor_parallel_degree 2", "--pipeline_parallel_degree 2"
ONE = "--per_device_train_batch_size 1"
TWO = {  # layouts of two processes
    "tp2": f"{TP} --per_device_train_batch_size 4",
    "tp2 sp": f"{TP} --sequence_parallel 1 --per_device_train_batch_size 2 --recompute",
    "pp2": f"{PP} {ONE}",
    "pp2 one micro-batch": f"{PP} --per_device_train_batch_size 8",
    "pp2 v2": f"{PP} --virtual_pp_degree 2 {ONE} --recompute --recompute_granularity core_attn",
}
FOUR = {  # of four
    "tp2 pp2": f"{TP} {PP} {ONE}",
    "tp2 sp pp2 v2": f"{TP} --sequence_parallel 1 {PP} --virtual_pp_degree 2 {ONE}",
    "tp2 stage1": f"{TP} --sharding stage1 {ONE}",
    "tp2 stage2": f"{TP} --sharding stage2 {ONE}",
    "tp2 stage3": f"{TP} --sharding stage3 {ONE}",
    "pp2 stage1": f"{PP} --sharding stage1 {ONE}",
    "pp4": f"--pipeline_parallel_degree 4 {ONE}",
}
SHARDED = {"tp2 sp pp2 v2": "tp2 stage1", "tp2 stage3": "tp2 stage3", "pp2 stage1": "pp4"}  # what resumes from it
MASKED = " --eod_mask_loss"
QUIET, UNSAVED, TRAINED = " " + " ".join(NO_EVAL), " --save_strategy no", " " + " ".join(ONLY_TRAINED)
HALF_OF_FOUR = {"tp2 pp2": UNSAVED, "tp2 stage1": QUIET, "tp2 stage2": TRAINED, "pp2 stage1": QUIET}
MORE = {"tp4": f"--tensor_parallel_degree 4 {ONE}"}  # of four, slow
HALF = " --bf16 --fp16_opt_level O2"
NORM = 0.02  # of bfloat16's norm; what is on several processes counted more than once would be more
SCALE, WINDOW = 81920, 3  # no power of two
HALVED = 6  # steps in which a scale that is too large is halved until it fits, and doubled again
FLOAT16 = f" --fp16 --fp16_opt_level O2 --scale_loss {SCALE} --loss_scale_window {WINDOW}"


def stock_model(folder, heads):
    """A stock GPT-2 of 4 layers with random weights and a vocabulary that does not divide in `folder`."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 509, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": heads}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return stock_model(tmp_path_factory.mktemp("layouts") / "model", heads=4)


@pytest.fixture(scope="module")
def steep(model, tmp_path_factory):
    """The same network, whose gradients are 256 times as large in v of layer 0, head 3 alone.

    That head's v is so much smaller, and what its output is multiplied with so much larger.
    """
    folder = tmp_path_factory.mktemp("steep") / "model"
    network = GPT2LMHeadModel.from_pretrained(model)
    attention = network.transformer.h[0].attn
    with torch.no_grad():
        attention.c_attn.weight[:, -8:] /= 256
        attention.c_attn.bias[-8:] /= 256
        attention.c_proj.weight[-8:] *= 256
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wanted(model, corpus_folder):
    """Losses, final weights and gradient norms of the independent loop."""
    return reference_run(model, corpus_folder / "mmap", STEPS, 1, 8)


@pytest.fixture(scope="module")
def words(model, corpus_folder):
    base = [*BASE, "--input_dir", corpus_folder / "mmap", "--model_name_or_path", model]
    return [*base, "--per_device_eval_batch_size", 2]


def case(words, folder, name, more):
    return name, [*words, *NO_DROPOUT, *more.split(), "--output_dir", folder / name.replace(" ", "_")]


@pytest.fixture(scope="module")
def two(words, steep, tmp_path_factory):
    """Each layout: whole, in bfloat16, with dropout twice, and resumed from the checkpoint of each other one."""
    folder = tmp_path_factory.mktemp("two")
    cases = [case(words, folder, name, more) for name, more in TWO.items()]
    cases += [case(words, folder, f"{name} bf16", f"{TWO[name]}{HALF}") for name in ("tp2 sp", "pp2 v2")]
    cases.append(case(words, folder, "pp2 v2 master bf16", f"{TWO['pp2 v2']}{HALF} --amp_master_grad{TRAINED}"))
    cases.append(case(words, folder, "pp2 bf16 O1", f"{TWO['pp2']} --bf16{UNSAVED}"))
    cases.append(case(words, folder, "tp2 bf16 O1", f"{TWO['tp2']} --bf16{UNSAVED}"))
    for name in ("tp2 sp", "pp2 v2"):
        dropout = "--hidden_dropout_prob 0.2 --attention_probs_dropout_prob 0.2"
        cases.append(case(words, folder, f"{name} dropout", f"{TWO[name]} {dropout}{QUIET}"))
        start = folder / f"{name} dropout".replace(" ", "_") / f"checkpoint-{SAVED}"
        more = f"{TWO[name]} {dropout} --resume_from_checkpoint {start}{TRAINED}"
        cases.append(case(words, folder, f"{name} dropout again", more))
    for saved, resumed in (("tp2", "pp2"), ("pp2", "tp2 sp"), ("pp2 v2", "ddp"), ("ddp", "pp2 v2"), ("tp2", "tp2")):
        if saved == "ddp":
            cases.append(case(words, folder, "ddp", f"--per_device_train_batch_size 4{QUIET}"))
        start = folder / saved.replace(" ", "_") / f"checkpoint-{SAVED}"
        more = TWO.get(resumed, "--per_device_train_batch_size 4") + f" --resume_from_checkpoint {start}{TRAINED}"
        cases.append(case(words, folder, f"{saved} to {resumed}", more))
    for name in ("tp2", "pp2"):
        more = f"{TWO[name]}{FLOAT16} --model_name_or_path {steep}{QUIET}"
        cases.append(case(words, folder, f"{name} overflow", more))
        start = folder / f"{name} overflow".replace(" ", "_") / f"checkpoint-{SAVED}"
        cases.append(case(words, folder, f"{name} overflow again", f"{more} --resume_from_checkpoint {start}"))
        more = f"{TWO[name]} --fp16 --scale_loss {2**20} --loss_scale_window {WINDOW}{QUIET}"
        cases.append(case(words, folder, f"{name} overflow O1", f"{more} --max_steps {HALVED} --save_steps {HALVED}"))
    cases.append(case(words, folder, "only evaluated", f"{PP} --do_train 0 --model_name_or_path {folder}/tp2"))
    more = f"{PP} --virtual_pp_degree 2 {ONE} --do_train 0 --model_name_or_path {folder}/tp2"
    cases.append(case(words, folder, "evaluated one by one", f"{more} --per_device_eval_batch_size 1 --eval_iters 4"))
    return folder, run_session(2, cases, folder)


@pytest.fixture(scope="module")
def four(words, steep, corpus_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    cases = [case(words, folder, name, more) for name, more in FOUR.items()]
    cases += [case(words, folder, f"{name} bf16", f"{FOUR[name]}{HALF}{more}") for name, more in HALF_OF_FOUR.items()]
    more = f"{FOUR['pp2 stage1']}{HALF} --amp_master_grad{TRAINED}"
    cases.append(case(words, folder, "pp2 stage1 master bf16", more))
    more = f"{FOUR['tp2 pp2']}{FLOAT16} --model_name_or_path {steep}{QUIET}"
    cases.append(case(words, folder, "tp2 pp2 overflow", more))
    data = shutil.copytree(corpus_folder / "mmap", folder / "data")
    for name in ("pp4", "tp2 pp2"):
        cases.append(case(words, folder, f"{name} masked", f"{FOUR[name]}{MASKED} --input_dir {data}{UNSAVED}"))
    start = folder / "tp2_pp2" / f"checkpoint-{SAVED}"
    for name in ("tp2 stage3", "tp2 pp2"):
        cases.append(
            case(words, folder, f"tp2 pp2 to {name}", f"{FOUR[name]} --resume_from_checkpoint {start}{TRAINED}")
        )
    for name, resumed in SHARDED.items():
        more = f"--checkpoint_format sharded --async_save{QUIET}"
        cases.append(case(words, folder, f"{name} sharded", f"{FOUR[name]} {more}"))
        start = folder / f"{name} sharded".replace(" ", "_") / f"checkpoint-{SAVED}"
        more = f"{FOUR[resumed]} --resume_from_checkpoint {start}{TRAINED}"
        cases.append(case(words, folder, f"{name} sharded to {resumed}", more))
    return folder, run_session(4, cases, folder)


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def check(session, wanted, name):
    """The layout's run is the independent loop: losses, gradient norms, and the weights that stock code loads."""
    folder, results = session
    reference_losses, reference_weights, reference_norms = wanted
    assert losses(results[name]) == pytest.approx(reference_losses, abs=1e-5)
    assert norms(results[name]) == pytest.approx(reference_norms, abs=1e-4)
    for key, value in weights(folder / name.replace(" ", "_")).items():
        torch.testing.assert_close(value, reference_weights[key], atol=3e-5, rtol=0)


@pytest.mark.distributed
@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_like_one(two, wanted, name):
    check(two, wanted, name)


@pytest.mark.distributed
@pytest.mark.parametrize("name", FOUR)
def test_four_processes_train_like_one(four, wanted, name):
    check(four, wanted, name)


@pytest.fixture(scope="module")
def autotp(model, corpus_folder, tmp_path_factory):
    """What DeepSpeed's AutoTP makes of the same weights and samples on two processes, see autotp.py."""
    folder = tmp_path_factory.mktemp("autotp")
    torch.save(reference_batches(corpus_folder / "mmap", STEPS, 8), folder / "batches.pt")
    launch(2, "autotp.py", model, folder / "batches.pt", folder / "result.json", log=folder / "log.txt")
    return json.loads((folder / "result.json").read_text())


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["layers", "vocabulary"])
def test_deepspeeds_own_tensor_parallelism_trains_alike(two, autotp, case):
    """The losses of both ways to split one network, with the vocabulary as we do and without; layers are 4."""
    split = {name.removeprefix("transformer.") for name in autotp[case]["split"]}
    parts = ("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight")
    parts += ("mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight")
    vocabulary = {"wte.weight"} if case == "vocabulary" else set()
    assert split == {f"h.{layer}.{part}" for layer in range(4) for part in parts} | vocabulary
    for name in ("tp2", "tp2 sp"):
        assert losses(two[1][name]) == pytest.approx(autotp[case]["losses"], abs=1e-5)
        assert norms(two[1][name]) == pytest.approx(autotp[case]["norms"], abs=1e-4)


@pytest.mark.distributed
def test_padding_and_documents_in_every_layout(model, tmp_path):
    """Padding without a mask against one process that masks it; documents against one process, too."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[16], [5], [11], [1]])
    mask = torch.arange(16) < lengths
    ids = torch.randint(0, 500, (4, 16), generator=generator)
    targets = torch.randint(0, 500, (4, 16), generator=generator).masked_fill(~mask, -100)
    documents = documents_in([16, 5, 11, 1, 10, 5, 4, 12], 16)
    torch.save((ids, targets, documents), tmp_path / "batch.pt")
    launch(2, "padded.py", model, tmp_path / "batch.pt", tmp_path / "result.json", log=tmp_path / "log.txt")

    def alone(**how):
        single = load_model(str(model), hidden_dropout=0.0, attention_dropout=0.0)
        loss = single(ids, shift_labels=targets, **how).loss
        loss.backward()
        norm = torch.stack([p.grad.double().square().sum() for p in single.parameters()]).sum().sqrt()
        return pytest.approx([loss.item(), norm.item()], abs=1e-5)

    found = json.loads((tmp_path / "result.json").read_text())
    padded, apart = alone(attention_mask=mask.long()), alone(**documents)
    assert [found[layout] for layout in ("tensor", "sequence", "pipeline")] == [padded] * 3
    for layout in ("tensor", "sequence", "pipeline"):
        assert found[f"{layout}, documents"] == apart
        assert found[f"{layout}, dropout"] != apart and all(map(math.isfinite, found[f"{layout}, dropout"]))


@pytest.mark.distributed
def test_stages_between_the_first_and_the_last_read_no_tokens(four, wanted):
    """Also where targets are left out, which each process counts: the loss is that of processes that read all."""
    between, none = four[1]["pp4 masked"], four[1]["tp2 pp2 masked"]
    assert between["read"][1:3] == [0, 0] and all(size > 0 for size in between["read"][::3] + none["read"])
    assert losses(between) == pytest.approx(losses(none), abs=1e-5)
    assert between["metrics"]["eval_loss"] == pytest.approx(none["metrics"]["eval_loss"], abs=1e-5)
    assert losses(between) != pytest.approx(wanted[0], abs=1e-4)


@pytest.mark.slow
def test_more_layouts_of_four(words, wanted, tmp_path):
    results = run_session(4, [case(words, tmp_path, name, more) for name, more in MORE.items()], tmp_path)
    for name in MORE:
        check((tmp_path, results), wanted, name)


@pytest.mark.slow
def test_compiled_layouts_train_like_one(words, wanted, tmp_path):
    """The exchanges are compiled with their blocks; and dropout draws the same numbers.

    Where it is computed again it draws the compiler's, whatever part of a block that is.
    """
    names = ("tp2", "tp2 sp", "pp2", "pp2 v2")
    dropout = "--hidden_dropout_prob 0.2 --attention_probs_dropout_prob 0.2"
    kept = {"pp2 v2": " --recompute 0"}  # what the compiler computes again it draws itself
    cases = [case(words, tmp_path, name, f"{TWO[name]} --torch_compile") for name in names]
    for name in names:
        for compiled in ("", " --torch_compile"):
            more = f"{TWO[name]} {dropout}{kept.get(name, '')}{compiled}"
            cases.append(case(words, tmp_path, f"{name} dropout{compiled}", more))
    again = [f"again {granularity}" for granularity in ("core_attn", "full_attn", "full")]
    for name in again:
        more = f"{TWO['pp2']} {dropout} --torch_compile --recompute 1 --recompute_granularity {name.split()[1]}"
        cases.append(case(words, tmp_path, name, more))
    results = run_session(2, cases, tmp_path)
    for name in again[1:]:
        assert losses(results[name]) == pytest.approx(losses(results[again[0]]), abs=1e-5)
        assert norms(results[name]) == pytest.approx(norms(results[again[0]]), abs=1e-4)
    for name in names:
        check((tmp_path, results), wanted, name)
        plain = losses(results[f"{name} dropout"])
        assert losses(results[f"{name} dropout --torch_compile"]) == pytest.approx(plain, abs=1e-5), name
        assert plain != pytest.approx(wanted[0], abs=1e-3), name


@pytest.mark.distributed
def test_evaluations_agree(two, four):
    """At the same weights: the loss of all targets, whatever reads them."""
    found = {
        name: [entry["eval_loss"] for entry in results[name]["history"] if "eval_loss" in entry]
        for session in (two, four)
        for results in [session[1]]
        for name in (*TWO, *FOUR)
        if name in results and "stage" not in name  # two replicas read twice as many windows
    }
    assert len(found) == len(TWO) + 3
    for name, values in found.items():
        assert values == pytest.approx(found["pp2"], abs=2e-5), name
    alone = two[1]["only evaluated"]["metrics"]["eval_loss"]
    assert alone == pytest.approx(found["tp2"][-1], abs=1e-6)
    single = two[1]["evaluated one by one"]["metrics"]["eval_loss"]
    assert single == pytest.approx(found["tp2"][-1], abs=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["tp2 sp", "pp2 v2", "pp2 v2 master", "pp2 bf16 O1", "tp2 bf16 O1"])
def test_bfloat16(two, wanted, name):
    name = name if "bf16" in name else f"{name} bf16"
    assert losses(two[1][name]) == pytest.approx(wanted[0], abs=4e-3)
    assert losses(two[1][name]) != pytest.approx(wanted[0], abs=1e-6)
    assert norms(two[1][name]) == pytest.approx(wanted[2], rel=NORM)


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*HALF_OF_FOUR, "pp2 stage1 master"])
def test_bfloat16_on_four(four, wanted, name):
    assert losses(four[1][f"{name} bf16"]) == pytest.approx(wanted[0], abs=4e-3)
    assert norms(four[1][f"{name} bf16"]) == pytest.approx(wanted[2], rel=NORM)


def overflowing_run(folder, data):
    """The independent loop in float32, which leaves out a step where float16 would overflow and halves the scale.

    Returns:
        losses; in which steps which elements overflowed, (name, index) each; the last scale.
    """
    model = GPT2LMHeadModel.from_pretrained(folder, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0).train()
    matrices = [p for name, p in model.named_parameters() if "bias" not in name and "ln_" not in name]
    rest = [p for name, p in model.named_parameters() if "bias" in name or "ln_" in name]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    tokens, rates = reference_batches(data, STEPS, 8)
    found, overflows, scale, good = [], [], SCALE, 0
    for batch in tokens:
        loss = cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        found.append(loss.item())
        gradients = [(name, p.grad.abs() * scale) for name, p in model.named_parameters()]
        limit = torch.finfo(torch.float16).max
        peak = max(gradient.max().item() for _, gradient in gradients)
        assert abs(peak / limit - 1) > 0.2  # far enough for float16 to decide as we do
        overflows.append([(name, i) for name, gradient in gradients for i in (gradient > limit).nonzero().tolist()])
        if overflows[-1]:
            scale, good = scale / 2, 0
            continue
        for group in optimizer.param_groups:
            group["lr"] = rates[sum(not step for step in overflows) - 1]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        good += 1
        scale *= 2 if good % WINDOW == 0 else 1
    return found, overflows, scale


@pytest.mark.distributed
def test_an_overflow_on_one_rank_is_one_of_all(two, four, words, steep, corpus_folder, tmp_path):
    """A step is left out on every rank, the scale is halved and doubled again together, and training goes on.

    What overflows lies on the first stage and on the second of two tensor-parallel processes: columns 64 to 95 of
    `c_attn` are v, the last 8 of them head 3.
    """
    wanted, overflows, scale = overflowing_run(steep, corpus_folder / "mmap")
    assert [bool(step) for step in overflows] == [True] + (STEPS - 1) * [False] and scale == SCALE
    assert {name.removesuffix("weight").removesuffix("bias") for name, _ in overflows[0]} == {
        "transformer.h.0.attn.c_attn."
    }
    assert all(index[-1] >= 88 for _, index in overflows[0])
    more = f"--per_device_train_batch_size 8 {FLOAT16} --model_name_or_path {steep}"
    alone = run_session(1, [case(words, tmp_path, "alone", more)], tmp_path)["alone"]
    runs = {"alone": (1, tmp_path, alone), "tp2 pp2 overflow": (4, four[0], four[1]["tp2 pp2 overflow"])}
    for name in ("tp2 overflow", "pp2 overflow", "tp2 overflow again", "pp2 overflow again"):
        runs[name] = (2, two[0], two[1][name])
    for name, (processes, folder, run) in runs.items():
        assert run["scale"] == processes * [{"value": scale, "good_steps": STEPS - 1, "overflows_left": 1}], name
        assert losses(run) == pytest.approx(wanted, abs=1e-3), name
        assert read(folder / name.replace(" ", "_") / f"checkpoint-{STEPS}").manifest.optimizer_steps == STEPS - 1, name
    for name in ("tp2", "pp2"):
        assert losses(two[1][f"{name} overflow again"]) == losses(two[1][f"{name} overflow"])


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_overflows_of_autocast_are_those_of_all(two, wanted, name):
    """2^20 is too much, halved until the gradients fit, the same on both ranks; the first loss is what it is."""
    folder, run = two[0] / f"{name}_overflow_O1", two[1][f"{name} overflow O1"]
    skipped = HALVED - read(folder / f"checkpoint-{HALVED}").manifest.optimizer_steps
    good = HALVED - skipped
    assert 1 <= skipped <= HALVED - WINDOW
    state = {"value": 2**20 / 2**skipped * 2 ** (good // WINDOW), "good_steps": good, "overflows_left": 1}
    assert run["scale"] == [state, state]
    assert losses(run)[0] == pytest.approx(wanted[0][0], abs=1e-3) and all(map(math.isfinite, losses(run)))


@pytest.mark.distributed
@pytest.mark.parametrize("pair", ["tp2 to pp2", "pp2 to tp2 sp", "pp2 v2 to ddp", "ddp to pp2 v2", "tp2 to tp2"])
def test_a_checkpoint_goes_on_in_any_layout(two, wanted, pair):
    exact = pair == "tp2 to tp2"
    found = losses(two[1][pair])[-(STEPS - SAVED) :]
    if exact:
        assert found == losses(two[1]["tp2"])[-(STEPS - SAVED) :]
    assert found == pytest.approx(wanted[0][SAVED:], abs=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("pair", ["tp2 pp2 to tp2 stage3", "tp2 pp2 to tp2 pp2"])
def test_a_checkpoint_goes_on_in_any_layout_of_four(four, wanted, pair):
    assert losses(four[1][pair])[-(STEPS - SAVED) :] == pytest.approx(wanted[0][SAVED:], abs=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("name", SHARDED)
def test_shards_hold_what_one_process_writes(four, name):
    folder, results = four
    whole, sharded = (folder / f"{name}{form}".replace(" ", "_") for form in ("", " sharded"))
    assert losses(results[f"{name} sharded"]) == losses(results[name])
    for step in (SAVED, STEPS):
        assert_same_tensors(whole / f"checkpoint-{step}", sharded / f"checkpoint-{step}")
    final = weights(sharded)
    assert all(torch.equal(final[key], value) for key, value in weights(whole).items())
    again = results[f"{name} sharded to {SHARDED[name]}"]
    exact = SHARDED[name] == name
    assert losses(again) == (losses(results[name]) if exact else pytest.approx(losses(results[name]), abs=1e-5))


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["tp2 sp", "pp2 v2"])
def test_dropout_goes_on_exactly(two, wanted, name):
    whole, again = losses(two[1][f"{name} dropout"]), losses(two[1][f"{name} dropout again"])
    assert again[-(STEPS - SAVED) :] == whole[-(STEPS - SAVED) :]
    assert whole != pytest.approx(wanted[0], abs=1e-3)  # there was dropout


@pytest.mark.distributed
def test_the_checkpoint_says_what_wrote_it(two):
    facts = read(two[0] / "pp2_v2" / f"checkpoint-{SAVED}").manifest
    assert (facts.layout, facts.consumed_samples) == ([1, 2, 2], SAVED * 8)
