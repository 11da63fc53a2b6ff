"""Signals at many moments of each command: it ends at once, or after its checkpoint, and leaves nothing behind."""

import signal

import pytest

from tests.fuzz.cases import Case
from tests.fuzz.workers import Sending

COMMANDS = (
    "pretrain", "pretrain-text", "pretrain-resume", "sft", "sft-lora", "predict-json", "evaluate", "chat", "report",
    "tokenizer", "preprocess-txt", "data-merge", "convert-hf", "convert-paddle", "convert-gguf", "merge-lora", "plan",
)  # fmt: skip
NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@pytest.mark.parametrize("command", ["tokenizer", *(pytest.param(one, marks=pytest.mark.slow) for one in COMMANDS)])
def test_signals_at_many_moments(session, command, request):
    count = 30 if request.node.get_closest_marker("slow") else 3
    seconds = session.ended(Case(command)).computed
    for place in range(count):
        number = NUMBERS[place % 3]
        numbers = (number,) if place % 4 else (number, number)  # every fourth time twice
        sending = Sending(seconds * (place + 0.5) / count, numbers, (0.02, 0.3)[place % 8 // 4])
        ended = session.ended(Case(command), sending)
        assert not ended.faults, (sending, ended)
        assert ended.code in (0, 128 + number), (sending, ended)
