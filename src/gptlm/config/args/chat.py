"""Arguments of `gptlm chat` and `gptlm serve`: those of predict that load and sample, and a few of their own."""

from dataclasses import dataclass

from gptlm.config.args.inference import PredictArguments
from gptlm.config.field import LARGEST_PORT, arg


@dataclass(frozen=True, kw_only=True)
class ChatArguments(PredictArguments):
    """Chat"""

    model_name_or_path: str = arg(
        "", "model folder, LoRA adapter folder, built-in name, or OWNER/NAME of the hub (required)"
    )
    tgt_length: int = arg(512, "maximum number of new tokens of an answer", ge=1, unit="tokens")
    system: str | None = arg(None, "message of the system, with which every conversation begins")


@dataclass(frozen=True, kw_only=True)
class ServeArguments(PredictArguments):
    """OpenAI-compatible server"""

    model_name_or_path: str = arg(
        "", "model folder, LoRA adapter folder, built-in name, or OWNER/NAME of the hub (required)"
    )
    served_model_name: str | None = arg(None, "name of the model in requests; unset: that of its folder")
    tgt_length: int = arg(512, "new tokens of an answer where a request has no max_tokens", ge=1, unit="tokens")
    top_k: int = arg(0, "default of requests: keep the k most likely tokens; 0: all", ge=0)
    top_p: float = arg(1.0, "default of requests: keep the most likely tokens up to this probability", gt=0, le=1)
    temperature: float = arg(1.0, "default of requests; 0: the most likely token", ge=0, le=100)
    host: str = arg("127.0.0.1", "address to listen on")
    port: int = arg(8000, "port to listen on", ge=1, le=LARGEST_PORT)
