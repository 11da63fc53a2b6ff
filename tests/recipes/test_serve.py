"""The page in headless Chromium; needs `pip install playwright` and a Chromium."""

import html
import http.client
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from types import ModuleType

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from gptlm.commands.predict import parse_predict
from gptlm.data.templates import plain_template
from gptlm.inference.generation import stream_decoder
from gptlm.model.tokenizer import train_tokenizer
from gptlm.recipes.serve import LONGEST_PROMPT, _Writer
from tests.conftest import ROOT, run_script

PROMPT = "the cat 今天"


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "模型"
    shutil.copytree(tiny_model, path)
    train_tokenizer(["the cat sat on the mat and the dog sat on the log " * 20], 300).save_pretrained(path)
    return path


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def page(folder):
    """The address of the page, and its process."""
    pytest.importorskip("gradio")
    command = [sys.executable, str(ROOT / "scripts/predict_generation.py"), "--serve", "--port", str(free_port())]
    words = ["--model_name_or_path", str(folder), "--device", "cpu", "--tgt_length", "30"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = next((line for line in process.stdout if "the page is open" in line), "")
        yield re.search(r"http://\S+", line)[0], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def shown(tab, wanted, seconds=30):
    """Every text that the page shows until it is `wanted`."""
    seen = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        text = tab.locator("#continuation textarea").input_value()
        seen += [text] if text not in seen else []
        if text == wanted:
            break
        time.sleep(0.002)
    return seen


def stock_text(folder, **options):
    """What stock code adds to PROMPT: 30 tokens, ids that are no tokens left out."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    known = len(tokenizer)
    out = GPT2LMHeadModel.from_pretrained(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=30,
        suppress_tokens=list(range(known, 500)),
        pad_token_id=0,
        **options,
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).rstrip("\ufffd")


@pytest.mark.slow
def test_a_person_types_a_prompt(page, browser, folder):
    """Text is streamed, equals stock code's and follows the controls; no request leaves this machine."""
    address, process = page
    tab, requests, problems = browser.new_page(), [], []
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("pageerror", lambda error: problems.append(error))
    tab.goto(address)
    tab.locator("#prompt textarea").fill(PROMPT)
    tab.get_by_role("button", name="Continue").click()
    greedy = stock_text(folder)
    seen = shown(tab, greedy)
    assert seen[-1] == greedy and all(greedy.startswith(text) for text in seen)
    tab.get_by_label("repetition_penalty").first.fill("2")
    tab.get_by_role("button", name="Continue").click()
    penalised = stock_text(folder, repetition_penalty=2.0)
    assert greedy != penalised == shown(tab, penalised)[-1]
    outside = [url for url in requests if not url.startswith((address, "data:", "blob:"))]
    assert len(requests) > 5 and outside == [] and problems == []
    tab.locator("#prompt textarea").fill("the " * 100)  # beyond the position table
    tab.get_by_role("button", name="Continue").click()
    tab.get_by_text("fills the position table of 64").wait_for(timeout=10_000)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def test_a_taken_port_is_reported_before_loading():
    pytest.importorskip("gradio")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run_script("predict_generation", "--serve", "--port", port, "--model_name_or_path", "nowhere")
    assert result.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "Traceback" not in result.stderr and "nowhere" not in result.stderr


def test_without_gradio_the_extra_is_named():
    code = (
        "import sys; sys.modules['gradio'] = None; from gptlm.cli import main; sys.exit(main(['predict', '--serve']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1 and "pip install 'gptlm[serve]'" in result.stderr


class ShownError(Exception):
    """As gradio's: the text is HTML."""

    def __init__(self, message, print_exception):
        super().__init__(message)
        assert not print_exception  # a sentence in the page, no traceback in the terminal


CONTROLS = (20, False, 0, 1.0, 1.0, 1.0, 0, False)


@pytest.fixture
def writer(folder):
    from gptlm.recipes.predict import load

    arguments, _ = parse_predict(["--serve", "--model_name_or_path", str(folder), "--device", "cpu"], piped=False)
    gradio = ModuleType("gradio")
    gradio.Error = ShownError
    model, tokenizer = load(arguments)
    return _Writer(gradio, stream_decoder(model, tokenizer, False), tokenizer, arguments)


def test_an_abandoned_request_stops_and_the_next_one_is_answered(writer, caplog):
    whole = list(writer.write(PROMPT, *CONTROLS))[-1][0]
    steps = []
    decode = writer.decoder.decode

    def counted(*words):
        for row in decode(*words):
            steps.append(len(row.new))
            yield row

    writer.decoder.decode = counted
    request = writer.write(PROMPT, *CONTROLS)
    next(request)
    with caplog.at_level(logging.INFO):
        request.close()
    assert len(steps) == 1 and "a request was abandoned after" in caplog.text
    assert list(writer.write(PROMPT, *CONTROLS))[-1][0] == whole


@pytest.mark.parametrize(
    ("prompt", "controls", "says"),
    [
        ("a\ud800", CONTROLS, "the prompt"),
        (PROMPT, (None, *CONTROLS[1:]), "the model could not continue this"),
        (PROMPT, (*CONTROLS[:5], float("nan"), *CONTROLS[6:]), "nan"),
        ("the " * 100, CONTROLS, "fills the position table of 64"),
    ],
)
def test_errors_are_sentences_for_the_page(writer, prompt, controls, says):
    with pytest.raises(ShownError, match=says) as error:
        list(writer.write(prompt, *controls))
    assert "\n" not in str(error.value) and html.unescape(str(error.value)).isprintable()


def test_a_long_prompt_is_refused_before_it_is_tokenized(writer):
    writer.tokenizer = None
    with pytest.raises(ShownError, match="the prompt has 100,001 characters, at most 100,000 are read"):
        next(writer.write("a" * (LONGEST_PROMPT + 1), *CONTROLS))


@pytest.fixture
def chatting(writer):
    """The writer, with a thread as its main one."""
    threading.Thread(target=writer.main.run, daemon=True).start()
    return writer


def test_a_conversation_is_that_of_stock_transformers(chatting, folder):
    """Each answer follows the turns before it under plain headings, of which the tokenizer has no template."""
    first = list(chatting.chat([], PROMPT, *CONTROLS))
    messages, shown, box, speed = first[-1]
    said = messages[-1]["content"]
    assert messages == shown == [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": said}]
    assert box == "" and re.fullmatch(r"\d+ tokens, [\d.]+ tokens/s", speed) and len(first) > 5
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = plain_template("messages")
    ids = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    stock = GPT2LMHeadModel.from_pretrained(folder)
    known = list(range(len(tokenizer), 500))
    new = 63 - ids.shape[1]
    settings = {"max_new_tokens": min(20, new), "pad_token_id": 0, "suppress_tokens": known}
    out = stock.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
    assert tokenizer.decode(out, skip_special_tokens=True).rstrip("\ufffd") == said
    again = list(chatting.chat(messages, "the", *CONTROLS))[-1][0]
    assert again[:2] == messages and again[2] == {"role": "user", "content": "the"}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("a\ud800", "the message"),
        ("a" * (LONGEST_PROMPT + 1), "the message has 100,001 characters"),
        ("cat " * 99, "the model 64 positions"),
    ],
)
def test_errors_of_a_conversation_are_sentences_for_the_page(chatting, message, says):
    with pytest.raises(ShownError, match=says):
        list(chatting.chat([], message, *CONTROLS))


def test_only_own_requests_are_answered(page):
    address, _ = page
    host = address.removeprefix("http://").rstrip("/")

    def status(path="/config", method="GET", body=None, **headers):
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    assert status()[0] == status("/")[0] == status(Origin=f"http://{host}")[0] == 200
    assert status(Host="evil.example") == (403, "This page is not served at the address evil.example.")
    assert status(Origin="http://evil.example")[0] == 403
    assert status("/gradio_api/upload", "POST", b"x") == (403, "This page takes no files.")
    assert status("/gradio_api/queue/join", "POST", b"x" * (1 << 21))[0] == 413
    (entry,) = (entry for entry in json.loads(status()[1])["dependencies"] if entry["api_name"] == "continue")
    data = ["a" * (LONGEST_PROMPT + 1), 5, False, 0, 1, 1, 1, 0, False]
    request = json.dumps({"data": data, "fn_index": entry["id"], "session_hash": "s"})
    assert status("/gradio_api/queue/join", "POST", request, **{"Content-Type": "application/json"})[0] == 200
    assert "the prompt has 100,001 characters" in status("/gradio_api/queue/data?session_hash=s")[1]
