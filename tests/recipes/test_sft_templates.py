"""Every fine-tuned model has a chat template: stock pipelines continue messages as the rows of the training do."""

import json

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, pipeline

from gptlm.commands.sft import parse_sft
from gptlm.data.templates import CHATML_TEMPLATE, FORMS, conversation_of, is_plain, plain_template
from gptlm.errors import GptlmError
from gptlm.model.tokenizer import train_tokenizer
from gptlm.recipes.sft.run import sft
from gptlm.recipes.sft.tokenizer import find_sft_tokenizer

ASKED, SAID = "the cat", "sat on a mat"
TALK = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]
WORDS = (
    "--per_device_train_batch_size 2 --device cpu --disable_tqdm --report_to none --save_strategy no --weight_decay 0 "
    "--hidden_dropout_prob 0 --attention_probs_dropout_prob 0 --tgt_length 30 --src_length 60 --do_train "
    "--max_steps 60 --learning_rate 2e-2 --lr_scheduler_type constant"
).split()
RECORDS = {
    "messages": {"messages": TALK},
    "instruction": {"instruction": ASKED, "output": SAID},
    "text": {"src": ASKED, "tgt": SAID},
    "question": {"question": SAID, "context": "the cat sat on a mat", "answers": {"text": ["a mat"]}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates") / "m"
    texts = ["the cat sat on a mat while two dogs ran", "### Instruction: Response: User: Assistant: question"]
    tokenizer = train_tokenizer(texts * 5, 330)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    sizes = {"n_positions": 96, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **sizes)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def parsed(model, folder, *words, record=None):
    folder.mkdir(exist_ok=True)
    (folder / "d.jsonl").write_text(json.dumps(record or RECORDS["messages"]) + "\n")
    argv = [*WORDS, "--model_name_or_path", model, "--dataset_name_or_path", folder / "d.jsonl"]
    return parse_sft([*map(str, argv), "--output_dir", str(folder / "out"), *map(str, words)], {})


def stock_answer(folder, messages):
    """What stock transformers answers."""
    generator = pipeline("text-generation", str(folder), device="cpu")
    found = generator(messages, max_new_tokens=30, do_sample=False)
    return found[0]["generated_text"][-1]["content"]


@pytest.mark.parametrize("form", RECORDS)
def test_the_plain_template_asks_as_the_rows_do(model, tmp_path, form):
    """Trained on one record of each form, stock transformers answers its prompt as a message."""
    run = parsed(model, tmp_path, record=RECORDS[form])
    sft(run)
    out = tmp_path / "out"
    assert AutoTokenizer.from_pretrained(out).chat_template == plain_template(form)
    asked = "answer: a mat context: the cat sat on a mat" if form == "question" else ASKED
    said = f"question: {SAID}" if form == "question" else SAID
    assert stock_answer(out, [{"role": "user", "content": asked}]) == said
    again, _ = find_sft_tokenizer(parsed(out, tmp_path))
    assert again.chat_template is None  # the next training encodes as this one has


@pytest.mark.parametrize("record", ["messages", "instruction", "text"])
def test_chatml_renders_every_record(model, tmp_path, record):
    run = parsed(model, tmp_path, "--chat_template", "chatml", record=RECORDS[record])
    sft(run)
    tokenizer, stock = (kind.from_pretrained(tmp_path / "out") for kind in (AutoTokenizer, GPT2LMHeadModel))
    assert tokenizer.chat_template == CHATML_TEMPLATE and tokenizer.eos_token == "<|endoftext|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stock.generation_config.eos_token_id == end == stock.config.vocab_size - 1
    assert stock_answer(tmp_path / "out", TALK[:1]) == SAID


def test_a_template_in_a_file_with_another_end_of_text(model, tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}<assistant>")
    words = ["--chat_template", file, "--additional_special_tokens", "<end>", "--eos_token", "<end>"]
    tokenizer, new = find_sft_tokenizer(parsed(model, tmp_path, *words))
    assert tokenizer.apply_chat_template(TALK[:1], tokenize=False) == f"<user>{ASKED}<end><assistant>"
    assert [tokenizer.eos_token_id] == new
    for words, says in (
        (["--eos_token", "<nowhere>"], "'<nowhere>' is not in the vocabulary"),
        (["--chat_template", tmp_path / "nowhere"], "no such file"),
    ):
        with pytest.raises(GptlmError, match=says):
            find_sft_tokenizer(parsed(model, tmp_path, *words))


def test_plain_replaces_the_template_of_a_tokenizer(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tok")
    words = ["--tokenizer_name_or_path", tmp_path / "tok"]
    assert find_sft_tokenizer(parsed(model, tmp_path, *words))[0].chat_template == tokenizer.chat_template
    assert find_sft_tokenizer(parsed(model, tmp_path, *words, "--chat_template", "plain"))[0].chat_template is None


def test_our_own_templates_are_known():
    assert all(is_plain(plain_template(form, paddle=paddle)) for form in FORMS for paddle in (False, True))
    assert not is_plain(CHATML_TEMPLATE) and not is_plain(None)


def test_headings_are_no_part_of_a_message():
    from gptlm.data.conversations import PlainHeadings
    from gptlm.data.examples import read_examples

    record = {"system": "be kind", "instruction": "add", "input": "1 2", "output": "3", "history": [["a", "b"]]}
    (turns,) = read_examples([("f, line 1", record)], PlainHeadings()).examples
    contents = [(message["role"], message["content"]) for message in conversation_of(turns, "f").messages]
    wanted = [("system", "be kind"), ("user", "a"), ("assistant", "b"), ("user", "add\n1 2"), ("assistant", "3")]
    assert contents == wanted
