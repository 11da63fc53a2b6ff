"""A random model, a tokenizer, and texts for the benchmarks: speeds do not depend on what a model has learned.

Texts are words of the tokenizer's vocabulary, drawn with a seed. Each is one token, so lengths are exact.
"""

import json
import random
import re
import string
from pathlib import Path
from typing import Any

VOCABULARY = 50257
SIZES = {  # layers, width, heads, positions
    "345M": (24, 1024, 16, 1024),
    "1.3B": (24, 2048, 16, 1024),
    "tiny": (2, 64, 2, 1024),
}


def make_model(folder: Path, name: str, tokenizer_folder: str | None, vocabulary: int = VOCABULARY) -> None:
    """Write a GPT-2 of the size `name` with its tokenizer, as `save_pretrained` of transformers does.

    Args:
        tokenizer_folder: of the tokenizer; None: one with `vocabulary` entries is made.
    """
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder) if tokenizer_folder else made_tokenizer(vocabulary)
    layers, width, heads, positions = SIZES[name]
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=layers, n_embd=width, n_head=heads, n_positions=positions)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = GPT2LMHeadModel(config)
    model.to(torch.bfloat16).save_pretrained(folder)  # half the file; whoever loads it chooses the precision
    tokenizer.save_pretrained(folder)


def made_tokenizer(vocabulary: int) -> Any:
    """A byte-level BPE with `vocabulary` entries, trained on words of random letters."""
    from gptlm.model.tokenizer import train_tokenizer

    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randrange(2, 9))) for _ in range(40_000)]
    return train_tokenizer((" ".join(draw.choices(words, k=200)) for _ in range(2000)), vocabulary)


class Words:
    """Draws texts of a number of tokens."""

    def __init__(self, folder: Path):
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        self.words = sorted(word[1:] for word in vocabulary if re.fullmatch("Ġ[a-z]+", word))
        self.draw = random.Random(0)

    def text(self, least: int, most: int) -> str:
        """A text that begins with a blank, which belongs to a word's token."""
        return "".join(f" {word}" for word in self.draw.choices(self.words, k=self.draw.randint(least, most)))


def make_rows(folder: Path, words: Words, count: int, length: int) -> float:
    """Write `count` prompts and answers to folder/train.json; returns the mean tokens of a row, end of text included.

    Prompts have 30 tokens to 7/10 of `length`, answers 10 to 2/10: with 640 a row has 41 to 575, 308 on average.
    """
    folder.mkdir()
    total = 0
    with open(folder / "train.json", "w") as file:
        for _ in range(count):
            row = {"src": words.text(30, length * 7 // 10), "tgt": words.text(10, length * 2 // 10 - 2)}
            total += row["src"].count(" ") + row["tgt"].count(" ") + 1
            file.write(json.dumps(row) + "\n")
    (folder / "dev.json").write_text(json.dumps({"src": " a", "tgt": " b"}) + "\n")
    return total / count
