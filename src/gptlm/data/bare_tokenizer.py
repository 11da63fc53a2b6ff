"""What plain texts need of a tokenizer, without transformers, which takes worker processes seconds to import."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class BareTokenizer:
    """Attributes of a tokenizer of transformers that has no chat template, under their names there."""

    backend_tokenizer: Tokenizer
    added_tokens_decoder: dict[int, AddedToken]
    eos_token_id: int
    eos_token: str
    chat_template: None = None

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "BareTokenizer":
        return cls(
            tokenizer.backend_tokenizer,
            tokenizer.added_tokens_decoder,
            int(tokenizer.eos_token_id),  # type: ignore[arg-type]
            str(tokenizer.eos_token),
        )

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        """The ids of `texts`; special tokens in them become their ids, as is transformers' default."""
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.encode_special_tokens = False
        found = self.backend_tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in found]}
