"""How near generated texts come to reference texts: BLEU (sacrebleu) and ROUGE (rouge-score), as shares of 1."""

from collections.abc import Sequence
from typing import Any

from gptlm.errors import GptlmError

ROUGE = {"rouge1": "rouge1", "rouge2": "rouge2", "rougel": "rougeL"}


class Characters:
    """A tokenizer for rouge-score: every character but white space is a token."""

    def tokenize(self, text: str) -> list[str]:
        return [character for character in text if not character.isspace()]


class Words:
    """A tokenizer for rouge-score: what stands between white space, in any script."""

    def tokenize(self, text: str) -> list[str]:
        return text.lower().split()


def text_scores(predictions: Sequence[str], references: Sequence[str], level: str) -> dict[str, float]:
    """`bleu4` of the corpus and the means of the F-measures `rouge1`, `rouge2` and `rougel`, rounded to 4 digits.

    Args:
        level: "word", or "char" as PaddleNLP's fine-tuning counts.

    Raises:
        GptlmError: if a library is missing.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise GptlmError(f"{error.name} is missing; pip install sacrebleu rouge-score, or --generate_num 0") from error
    tokenizer: Any = Characters() if level == "char" else Words()
    scorer = RougeScorer(list(ROUGE.values()), tokenizer=tokenizer)
    found = [scorer.score(reference, prediction) for prediction, reference in zip(predictions, references, strict=True)]
    # effective_order: where no text has four tokens, shorter runs count
    bleu = BLEU(tokenize="char" if level == "char" else "13a", effective_order=True)
    total = bleu.corpus_score(list(predictions), [list(references)]).score
    means = {ours: sum(score[theirs].fmeasure for score in found) / len(found) for ours, theirs in ROUGE.items()}
    return {"bleu4": round(total / 100, 4), **{name: round(mean, 4) for name, mean in means.items()}}
