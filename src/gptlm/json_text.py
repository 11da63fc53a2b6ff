"""JSON from files that others wrote."""

import json
from typing import Any

from gptlm.errors import reason_of


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, with ValueError for everything that cannot be read.

    Raises:
        ValueError: also for values nested beyond the recursion limit, and for integers of more than 4,300 digits.
            `json.JSONDecodeError` for text that is not JSON.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(reason_of(error)) from error
