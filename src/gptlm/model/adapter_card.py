"""The README.md of a folder of adapters: a model card that says how plain PEFT loads them."""

from pathlib import Path

from huggingface_hub import ModelCardData

OURS = "<!-- Written by gptlm when adapters are saved; without this line the file is left as it is. -->"


def resize_call(entries: int) -> str:
    """What plain PEFT needs before adapters with added tokens: `entries` is the size of their vocabulary."""
    return f"model.resize_token_embeddings({entries})"


def write_card(folder: Path, base: str, entries: int | None) -> None:
    """Write `folder`/README.md; one that somebody else wrote stays.

    Args:
        base: folder or hub name of the model that the adapters belong to.
        entries: size of the vocabulary if tokens were added; None: the model's own.
    """
    path = folder / "README.md"
    if path.exists() and not (path.is_file() and OURS in path.read_text(encoding="utf-8", errors="replace")):
        return
    on_hub = not Path(base).is_absolute()  # the hub refuses a card whose base_model is a local path
    data = ModelCardData(
        base_model=base if on_hub else None, library_name="peft", pipeline_tag="text-generation", tags=["lora"]
    )
    call = resize_call(entries or 0)
    added = f"Tokens were added to the vocabulary: plain PEFT needs `{call}` first.\n\n" if entries else ""
    lines = [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({base!r})",
        *([call] if entries else []),
        'model = PeftModel.from_pretrained(model, ".")',
    ]
    code = "\n".join(["```python", *lines, "```"])
    text = f"---\n{data.to_yaml()}\n---\n\n{OURS}\n\n# LoRA adapters\n\nFor the model `{base}`.\n\n{added}{code}\n"
    path.write_text(text, encoding="utf-8")
