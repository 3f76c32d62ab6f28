"""The texts of token ids, from the tokenizer of a run's model. It needs no torch."""

from pathlib import Path
from typing import Any

from roll_lite.report.reader import RunFolder


class TokenTexts:
    """Texts by id; none if no tokenizer is found, and then `note` says so."""

    def __init__(self, run: RunFolder):
        self._tokenizer, self.note = None, ""
        folders = [run.folder / "model"]
        if model := run.options.get("model"):
            folders.append(Path(str(model)))
        found = [path for f in folders if (path := f / "tokenizer.json").is_file()]
        if not found:
            self.note = "tokens are shown as numbers: the model's folder with its tokenizer is gone"
            return
        from tokenizers import Tokenizer  # not above: only pages with samples need it

        try:
            self._tokenizer = Tokenizer.from_file(str(found[0]))
        except Exception as error:  # the package raises no narrower type
            self.note = f"tokens are shown as numbers: {found[0]} cannot be read: {error}"

    def of(self, samples: list[dict[str, Any]]) -> dict[int, str]:
        """Texts of all tokens of the samples."""
        if self._tokenizer is None:
            return {}
        lists = [s["token_ids"] for s in samples if isinstance(s.get("token_ids"), list)]
        ids = {i for numbers in lists for i in numbers if isinstance(i, int) and i >= 0}
        return {token_id: self._text(token_id) for token_id in sorted(ids)}

    def _text(self, token_id: int) -> str:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        token = self._tokenizer.id_to_token(token_id) or ""
        # Sentencepiece drops the space before the first word of a text.
        return f" {text}" if token.startswith("▁") and not text.startswith(" ") else text
