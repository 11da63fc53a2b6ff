"""The upload of a command's result to the HuggingFace hub."""

from collections.abc import Iterator
from dataclasses import fields

from gptlm.config.args.hub import RepositoryArguments
from gptlm.config.parser import Parsed
from gptlm.config.problem import Problem
from gptlm.errors import named


def upload_problems(parsed: Parsed) -> Iterator[Problem]:
    """Settings of an upload that is not asked for."""
    for setting in fields(RepositoryArguments):
        if not parsed[RepositoryArguments].push_to_hub and setting.name != "push_to_hub" and parsed.given(setting.name):
            yield Problem(setting.name, f"has no effect without {named('push_to_hub')}; leave it out")
