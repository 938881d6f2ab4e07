"""New tokens of one row -> its text, and whether that has ended."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from recipes.pipeline.config import GenerateConfig

CONTEXT = 4  # tokens of the prompt that are decoded along: some tokenizers drop the space before a text's first word
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a character shows as whose last bytes have not come yet


class Writer:
    """Text of one completion as it grows. `reason`: eos, stop or length once it has ended."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ends: Sequence[int], options: GenerateConfig
    ) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.ends = set() if options.ignore_eos else set(ends)
        self.context = list(prompt[-CONTEXT:])
        self.ids: list[int] = []
        self.reason: str | None = None
        self.told = 0
        self._end: int | None = None  # where a stop text begins

    @property
    def ended(self) -> bool:
        return self.reason is not None

    @property
    def text(self) -> str:
        """Without end token and stop text. Decoded when asked for: a look at every token must cost little."""
        return self._decode(len(self.ids))[: self._end]

    def add(self, ids: Sequence[int], last: bool = False) -> None:
        """Tokens that follow; what comes behind an end token or a stop text is dropped."""
        known = len(self.ids)
        for token in ids:
            self.ids.append(token)
            if token in self.ends:
                self.reason = "eos"
                break
        if self.options.stop and self._stop_place(self._decode(len(self.ids))) is not None:
            self._cut(known)
        elif last and not self.ended:
            self.reason = "length"

    def news(self) -> str:
        """Text since the last call, without what may still change: half a character, the beginning of a stop text."""
        text = self.text
        end = len(text)
        if not self.ended:
            while end and text[end - 1] == BROKEN:
                end -= 1
            longest = max((len(stop) for stop in self.options.stop), default=1) - 1
            end = max(self.told, end - longest)
        fresh, self.told = text[self.told : end], max(self.told, end)
        return fresh

    def _stop_place(self, text: str) -> int | None:
        places = [place for stop in self.options.stop if (place := text.find(stop)) >= 0]
        return min(places) if places else None

    def _cut(self, known: int) -> None:
        # Tokens up to the one that completed a stop text, whatever has been decoded beyond it
        for count in range(known + 1, len(self.ids) + 1):
            self._end = self._stop_place(self._decode(count))
            if self._end is not None:
                self.ids, self.reason = self.ids[:count], "stop"
                return

    def _decode(self, count: int) -> str:
        call = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        before = self.tokenizer.decode(self.context, **call)
        whole = self.tokenizer.decode(self.context + self.ids[:count], **call)
        if whole.startswith(before):
            return whole[len(before) :]
        return self.tokenizer.decode(self.ids[:count], **call)
