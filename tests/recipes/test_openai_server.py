"""The server of `gptlm serve`, asked by OpenAI's own client; its answers are those of stock transformers."""

import http.client
import json
import subprocess
import sys
import threading
import time
from urllib.error import HTTPError
from urllib.request import urlopen

import openai
import pytest
from transformers import AutoTokenizer, GenerationConfig

from gptlm.commands.serve import parse_serve
from gptlm.errors import UsageError
from gptlm.inference.chat import ChatPrompts
from gptlm.inference.generation import stream_decoder
from gptlm.inference.stop_texts import UntilStop
from gptlm.recipes.common.main_thread import BusyError, MainThread
from gptlm.recipes.openai_server import Api, _listen
from gptlm.recipes.predict import load
from gptlm.recipes.sft.run import sft
from tests.recipes.test_sft_templates import SAID, TALK, model, parsed, stock_answer

__all__ = ["model"]  # a fixture


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    sft(parsed(model, path, "--chat_template", "chatml"))
    return path / "out"


@pytest.fixture(scope="module")
def client(folder):
    arguments, _ = parse_serve(["--model_name_or_path", str(folder), "--device", "cpu", "--served_model_name", "m"])
    network, tokenizer = load(arguments)
    with _listen("127.0.0.1", 0) as server:
        server.api = Api(arguments, stream_decoder(network, tokenizer, False), tokenizer, ChatPrompts(tokenizer))
        threading.Thread(target=server.api.main.run, daemon=True).start()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none", max_retries=0)
        server.shutdown()


def test_an_answer_and_its_stream_are_those_of_stock_transformers(client, folder):
    assert [one.id for one in client.models.list()] == ["m"] == [client.models.retrieve("m").id]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False)
    said = len(tokenizer(SAID)["input_ids"])
    found = client.chat.completions.create(model="m", messages=TALK[:1], temperature=0)
    assert found.choices[0].message.content == SAID == stock_answer(folder, TALK[:1])
    assert (found.choices[0].finish_reason, found.object) == ("stop", "chat.completion")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(prompt), said)
    options = {"include_usage": True}
    parts = [{"type": "text", "text": TALK[0]["content"]}]
    asked = {"messages": [{"role": "user", "content": parts}], "model": "m", "temperature": 0}
    events = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == SAID
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "stop"
    assert events[-1].usage == found.usage and events[0].choices[0].delta.role == "assistant"


@pytest.mark.slow
def test_transformers_chat_talks_to_the_server(client, folder):
    """The real command, two turns."""
    command = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    words = ["chat", "m", f"http://127.0.0.1:{client.base_url.port}", "do_sample=False", "max_new_tokens=20"]
    talk = subprocess.run(
        [sys.executable, "-c", command, *words],
        input=f"{TALK[0]['content']}\ntwo dogs\n!exit\n", capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert talk.returncode == 0, talk.stderr
    answers = [line.strip() for line in talk.stdout.splitlines()]
    more = [TALK[0], {"role": "assistant", "content": SAID}, {"role": "user", "content": "two dogs"}]
    assert SAID in answers and stock_answer(folder, more) in answers[answers.index(SAID) + 1 :]


def test_what_transformers_chat_asks_for(client):
    with urlopen(f"http://127.0.0.1:{client.base_url.port}/health") as answer:
        assert (answer.status, json.load(answer)) == (200, {"status": "ok"})
    for name, expected in (("m", 200), ("other", 404), (None, 404)):
        connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port, timeout=30)
        connection.request("POST", "/load_model", json.dumps({"model": name}))
        answer = connection.getresponse()
        assert answer.status == expected
        body = answer.read()
        assert expected == 404 or body == b'data: {"status": "ready", "cached": true}\n\n'
        connection.close()
    asked = {"model": "m", "messages": TALK[:1], "max_tokens": 2}
    stock = GenerationConfig(do_sample=False, max_new_tokens=1).to_json_string()
    greedy = client.chat.completions.create(**asked, extra_body={"generation_config": stock})
    assert SAID.startswith(greedy.choices[0].message.content) and greedy.usage.completion_tokens == 2  # not 1
    alone = {"model": "m", "messages": TALK[:1], "extra_body": {"generation_config": stock}}
    assert client.chat.completions.create(**alone).usage.completion_tokens == 1


def test_an_address_without_anything_names_those_that_answer(client):
    for path in ("/", "/v1/embeddings"):
        with pytest.raises(HTTPError) as caught:
            urlopen(f"http://127.0.0.1:{client.base_url.port}{path}")
        message = json.load(caught.value)["error"]["message"]
        assert caught.value.code == 404 and f"nothing at {path};" in message and "/v1/chat/completions" in message


def test_texts_are_continued_up_to_what_the_request_says(client, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False)
    create, common = client.completions.create, {"model": "m", "temperature": 0}
    assert create(**common, prompt=ids).choices[0].text == SAID
    short = create(**common, prompt=[ids, ids], n=2, max_tokens=1)
    assert [choice.index for choice in short.choices] == [0, 1, 2, 3] and short.usage.completion_tokens == 4
    assert {choice.finish_reason for choice in short.choices} == {"length"}
    for stop in ("on a", ["nowhere", "on"]):
        one = create(**common, prompt=ids, stop=stop).choices[0]
        assert (one.text, one.finish_reason) == (SAID.partition("on")[0], "stop")
    streamed = create(**common, prompt=ids, stop="on", stream=True)
    assert "".join(event.choices[0].text for event in streamed) == SAID.partition("on")[0]


def test_a_seed_repeats_a_sample(client):
    def sample(seed):
        return (
            client.completions.create(model="m", prompt="the", temperature=9, seed=seed, max_tokens=20).choices[0].text
        )

    assert sample(1) == sample(1) and len({sample(seed) for seed in range(3)}) > 1


@pytest.mark.parametrize(
    ("wrong", "kind", "code", "says"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "there is 'm'"),
        ({"temperature": -1}, openai.BadRequestError, None, "temperature is -1"),
        ({"n": 1000}, openai.BadRequestError, None, "from 1 to 16"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, openai.BadRequestError, None, "unknown role"),
        (
            {"messages": [{"role": "user", "content": "cat " * 300}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 200_000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "",
        ),
        ({"frequency_penalty": 1}, openai.BadRequestError, "unsupported_parameter", "not implemented"),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "unknown_parameter", "nonsense"),
        ({"extra_body": {"generation_config": "{"}}, openai.BadRequestError, None, "not valid JSON"),
        ({"extra_body": {"generation_config": "[]"}}, openai.BadRequestError, None, "not a JSON object"),
        ({"extra_body": {"generation_config": {"num_beams": 4}}}, openai.BadRequestError, None, "num_beams is not"),
        ({"extra_body": {"generation_config": {"do_sample": 1}}}, openai.BadRequestError, None, "true or false"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_the_form_of_openai(client, wrong, kind, code, says, stream):
    with pytest.raises(kind) as error:
        list(client.chat.completions.create(**{"model": "m", "messages": TALK[:1]} | wrong, stream=stream))
    assert error.value.code == code and says in error.value.message
    assert error.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Host": "evil.example"}, b"{}", 403),
        ({"Origin": "http://evil.example"}, b"{}", 403),
        ({}, b"{", 400),
        ({}, b"[" * 100_000, 400),
        ({}, b"x" * (1 << 21), 413),
    ],
)
def test_requests_of_other_pages_and_damaged_ones(client, headers, body, status):
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=30)
    try:
        connection.putrequest("POST", "/v1/completions", skip_host="Host" in headers)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders()
        if status != 413:
            connection.send(body)
        answer = connection.getresponse()
        assert answer.status == status and json.loads(answer.read())["error"]["message"]
    finally:
        connection.close()


@pytest.fixture
def main():
    queue = MainThread(1)
    threading.Thread(target=queue.run, daemon=True).start()
    return queue


def test_an_abandoned_request_ends_and_the_next_one_is_answered(main):
    ended = threading.Event()

    def endless():
        try:
            while True:
                yield "x"
                time.sleep(0.001)
        finally:
            ended.set()

    stream = main.stream(endless)
    assert next(stream) == "x"
    stream.close()
    assert ended.wait(30) and list(main.stream(lambda: iter("ab"))) == ["a", "b"]
    ended.clear()
    assert set(main.stream(endless, lambda: False)) == {"x"} and ended.wait(30)


def test_too_many_requests_and_errors_of_one(main):
    begun, go = threading.Event(), threading.Event()

    def slow():
        begun.set()
        go.wait(30)
        yield 1
        raise ValueError("x")

    def read(found):
        with pytest.raises(ValueError, match="x"):
            found += main.stream(slow)

    results = [[], []]
    threads = [threading.Thread(target=read, args=(found,)) for found in results]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    while main._jobs.empty():
        time.sleep(0.01)
    with pytest.raises(BusyError):
        next(main.stream(slow))
    go.set()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["abc", "def"], ["cd"], "ab"),
        (["ab", "c", "x"], ["cd"], "abcx"),
        (["a", "b", "c"], [], "abc"),
        (["aab", "c"], ["abc", "bc"], "a"),
        (["ab"], ["bc"], "ab"),
    ],
)
def test_stop_texts_span_pieces(pieces, stops, text):
    found = UntilStop(pieces, stops)
    assert "".join(found) == text and found.found == (text != "".join(pieces))


@pytest.mark.parametrize("words", [["--prompt", "x"], ["--num_beams", "2"], ["--seed", "1"]])
def test_arguments_that_requests_have_are_refused(words):
    with pytest.raises(UsageError):
        parse_serve(["--model_name_or_path", "m", *words])
