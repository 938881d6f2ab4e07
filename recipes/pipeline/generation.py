"""Prompts -> completions: batches, the decoding loop, stopping, and the ranks' shares.

The loop asks the host nothing but every `stop_check` tokens; there it looks which rows have ended, hands out text, and leaves
ended rows behind. Prompts are sorted by length into batches; completions come back in the order of the prompts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from recipes.pipeline.config import GenerateConfig, InputError, RuntimeConfig
from recipes.pipeline.decoder import Decoder, Shape, keeps_graphs
from recipes.pipeline.generation_plan import padded_width
from recipes.pipeline.ranks import Ranks
from recipes.pipeline.room import out_of_memory
from recipes.pipeline.runtime import Runtime
from recipes.pipeline.sampling import Sampler, prompt_seed
from recipes.pipeline.texts import Writer

CHECK_ON_CARD = 16  # tokens


@dataclass(frozen=True)
class Request:
    ids: list[int]
    seed: int


@dataclass(frozen=True)
class Completion:
    text: str  # without prompt, end token and stop text
    ids: list[int]  # with the end token
    prompt_tokens: int
    new_tokens: int
    finish_reason: str  # eos, stop (a stop text), length (max_new_tokens)


@dataclass
class Speed:
    """What a rank has done so far; padding and ended rows do not count."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    first_token_seconds: float | None = None  # from the first batch's start to its first tokens


@dataclass
class Batch:
    """Requests that are decoded together, padded to `width`; those behind the last place are run and not read."""

    places: list[int]  # in the input
    requests: list[Request]
    width: int

    def split(self, rows: int) -> list[Batch]:
        """The same in parts of up to `rows`."""
        starts = range(0, len(self.places), rows)
        return [Batch(self.places[n : n + rows], self.requests[n : n + rows], self.width) for n in starts]

    def filled(self, rows: int) -> Batch:
        """With `rows` requests: where graphs are kept, a smaller batch would be a shape of its own."""
        return Batch(self.places, self.requests + self.requests[:1] * (rows - len(self.requests)), self.width)


@dataclass
class Generator:
    """Model, cache and loop of one run. `on_text(place, text, ended)` hears of new text at each look."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    options: GenerateConfig
    runtime: Runtime
    ends: list[int]
    execution: RuntimeConfig = field(default_factory=RuntimeConfig)
    ranks: Ranks = field(default_factory=Ranks)
    on_text: Callable[[int, str, bool], None] | None = None
    planned: Callable[[int], int] | None = (
        None  # rows of a batch, by the longest prompt's tokens, where they are not said
    )
    on_batch: Callable[[dict[int, Completion]], None] | None = None  # hears of what has just been finished, by place
    speed: Speed = field(default_factory=Speed)
    decoder: Decoder | None = None
    batch_rows: int | None = None  # rows of a batch, once known
    widest: tuple[list[list[int]], int] = ([], 0)  # prompts and their padded length, of the widest batch so far

    def rows(self, longest: int) -> int:
        """Rows of a batch of prompts of up to `longest` tokens: said, or from the memory plan. Collective."""
        if self.batch_rows is None:
            said = self.options.batch_size
            if not isinstance(said, int) and self.planned is None:
                raise InputError(f"generate.batch_size={said}: nothing here plans it; give a number of rows")
            self.batch_rows = said if isinstance(said, int) else self.planned(longest)
        return self.batch_rows

    def run(self, requests: Sequence[Request]) -> dict[int, Completion]:
        """Completions of this rank's share of `requests`, by place."""
        done: dict[int, Completion] = {}
        if not requests:
            return done
        self.rows(max(len(request.ids) for request in requests))
        self.model.eval()
        waiting = self.batches(requests)
        while waiting:
            self._make_room(waiting)
            spent = False
            try:
                # Fused decoding leaves nothing behind that a later forward with gradients could meet. In this order:
                # inference_mode(False) turns gradients on, and with them the in-place add off
                with torch.inference_mode(self.decoder.fused is not None), torch.no_grad():
                    finished = self._decode(waiting[0])
            except RuntimeError as error:
                spent = self._may_halve(error)
                if not spent:
                    raise
            if spent:  # here no traceback holds the tensors of the attempt any more
                waiting = self._halve(waiting)
                continue
            done.update(finished)
            if self.on_batch:
                self.on_batch(finished)
            waiting = waiting[1:]
        return done

    def _may_halve(self, error: RuntimeError) -> bool:
        automatic = self.options.batch_size == "auto" and self.batch_rows > 1
        alone = not self.ranks.lockstep and self.options.tensor_parallel == 1  # others wait inside the same forward
        return automatic and alone and out_of_memory(error)

    def _halve(self, waiting: list[Batch]) -> list[Batch]:
        self.decoder = None
        self.batch_rows = (self.batch_rows + 1) // 2
        print(f"out of memory: going on with {self.batch_rows} row(s) a batch", file=sys.stderr)
        return [half for batch in waiting for half in batch.split(self.batch_rows)]

    def batches(self, requests: Sequence[Request]) -> list[Batch]:
        """This rank's batches. Rows of like length go together, the longest first, dealt over the ranks."""
        order = sorted(range(len(requests)), key=lambda n: -len(requests[n].ids))
        size = self.batch_rows * self.ranks.groups
        whole = keeps_graphs(self.runtime, self.execution)
        batches = []
        for start in range(0, len(order), size):
            group = order[start : start + size]
            width = padded_width(len(requests[group[0]].ids), self.options, whole)
            own = group[self.ranks.group :: self.ranks.groups]
            if own:
                batches.append(Batch(own, [requests[n] for n in own], width))
            elif self.ranks.lockstep:  # a forward needs all ranks: this one runs a row that nobody reads
                batches.append(Batch([], [requests[group[0]]], width))
        return batches

    def _make_room(self, batches: list[Batch]) -> None:
        shape = Shape(
            rows=max(len(batch.requests) for batch in batches),
            length=max(batch.width for batch in batches) + self.options.max_new_tokens,
            padded=any(len(request.ids) < batch.width for batch in batches for request in batch.requests),
        )
        limit = self.model.config.max_position_embeddings
        longest = max(len(request.ids) for batch in batches for request in batch.requests)
        if longest + self.options.max_new_tokens > limit:
            raise InputError(
                f"a prompt of {longest} tokens and generate.max_new_tokens={self.options.max_new_tokens} are more than the"
                f" model's {limit} positions; lower it, or set generate.max_prompt_tokens={limit - self.options.max_new_tokens}"
            )
        if self.decoder is None or not self.decoder.shape.holds(shape):
            self.decoder = None  # the old cache's memory first
            self.decoder = Decoder(self.model, self.runtime, self.options, self.execution, shape)

    def _decode(self, batch: Batch) -> dict[int, Completion]:
        began = time.perf_counter()
        if self.decoder.whole:
            batch = batch.filled(self.decoder.shape.rows)
        prompts = [request.ids for request in batch.requests]
        if batch.width > self.widest[1]:
            self.widest = prompts, batch.width
        seeds = [request.seed for request in batch.requests]
        device = self.runtime.device
        sampler = Sampler(self.options, prompts, seeds, self.model.config.vocab_size).to(device)
        loop = Loop(self, batch, device)
        scores = self.decoder.prefill(prompts, batch.width, self.tokenizer.pad_token_id or 0)
        for step in range(self.options.max_new_tokens):
            loop.add(sampler(scores))
            if step == 0:
                self.runtime.synchronize()
                now = time.perf_counter()
                self.speed.prefill_seconds += now - began
                self.speed.prefill_tokens += sum(map(len, prompts[: len(batch.places)]))
                if self.speed.first_token_seconds is None:
                    self.speed.first_token_seconds = now - began
            last = step + 1 == self.options.max_new_tokens
            if (last or (step + 1) % loop.every == 0) and loop.look(sampler, last):
                break
            if not last:
                scores = self.decoder.step(loop.tokens)
            self.runtime.mark_step()
        self.runtime.mark_step()  # nothing is left over that the next batch's first graph would have to do
        self.speed.decode_seconds += time.perf_counter() - now
        completions = loop.completions()
        self.speed.decode_tokens += sum(c.new_tokens - 1 for c in completions.values())
        return completions


class Loop:
    """Tokens of one batch while it is decoded."""

    def __init__(self, generator: Generator, batch: Batch, device: torch.device) -> None:
        options, rows = generator.options, len(batch.requests)
        self.generator, self.batch, self.options = generator, batch, options
        self.pad = generator.tokenizer.pad_token_id or 0
        self.ends = None if options.ignore_eos else torch.tensor(generator.ends, device=device)
        # Values made on the host: a count of rows inside a lazy graph would make a graph for each
        self.finished = (torch.arange(rows) >= len(batch.places)).to(device)
        self.alive = list(range(rows))  # rows of the batch that the device still holds
        self.fresh: list[Tensor] = []  # tokens (B,) since the last look
        self.every = options.stop_check or (1 if generator.runtime.kind == "cpu" else CHECK_ON_CARD)
        context = [request.ids for request in batch.requests]
        self.writers = [Writer(generator.tokenizer, ids, generator.ends, options) for ids in context]
        for unread in self.writers[len(batch.places) :]:
            unread.reason = "unread"
        compact = options.compact
        self.compact = not generator.decoder.whole if compact is None else compact
        self.tokens: Tensor

    def add(self, tokens: Tensor) -> None:
        """The tokens (B,) just chosen; rows that have ended get padding."""
        self.tokens = tokens
        if self.ends is not None or self.options.stop:
            self.tokens = tokens.masked_fill(self.finished, self.pad)
        if self.ends is not None:
            self.finished = self.finished | (self.tokens.unsqueeze(1) == self.ends).sum(-1).bool()
        self.fresh.append(self.tokens)

    def look(self, sampler: Sampler, last: bool) -> bool:
        """Take what is new to the host; whether all rows, on all ranks that keep step, have ended."""
        columns = torch.stack(self.fresh, dim=1).cpu().tolist()
        self.fresh = []
        for row, ids in zip(self.alive, columns, strict=True):
            writer = self.writers[row]
            if not writer.ended:
                writer.add(ids, last)
                if self.generator.on_text:
                    self.generator.on_text(self.batch.places[row], writer.news(), writer.ended)
        going = [n for n, row in enumerate(self.alive) if not self.writers[row].ended]
        if not self.generator.ranks.any(bool(going)):
            return True
        if last:
            return True
        if self.options.stop:  # the device knows of end tokens only
            ended = [self.writers[row].ended for row in self.alive]
            self.finished = torch.tensor(ended, device=self.finished.device)
        if self.compact and going and len(going) <= len(self.alive) // 2:
            self._leave_behind(going, sampler)
        return False

    def _leave_behind(self, going: list[int], sampler: Sampler) -> None:
        rows = torch.tensor(going, device=self.finished.device)
        self.finished, self.tokens = self.finished.index_select(0, rows), self.tokens.index_select(0, rows)
        sampler.keep(rows)
        self.generator.decoder.keep(rows)
        self.alive = [self.alive[n] for n in going]

    def completions(self) -> dict[int, Completion]:
        """By place in the input."""
        result = {}
        for place, request, writer in zip(self.batch.places, self.batch.requests, self.writers, strict=False):
            result[place] = Completion(
                writer.text, writer.ids, len(request.ids), len(writer.ids), writer.reason or "length"
            )
        return result


def generate_texts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | list[int]],
    options: GenerateConfig,
    runtime: Runtime,
    ends: Sequence[int] | None = None,
    execution: RuntimeConfig | None = None,
    seed: int = 42,
    planned: Callable[[int], int] | None = None,
) -> list[Completion]:
    """Completions in the order of `prompts`: texts, continued as they stand, or token ids (recipes.pipeline.prompts.encode_prompt).

    ends: tokens that end a completion; None: the model's and the tokenizer's end tokens. planned: rows of a batch for a
    longest prompt, where options.batch_size is auto. Collective where several ranks run:
    each decodes its share, all get the whole list. The model is left in the mode (training or not) that it came in.
    """
    encoded = [encode_text(p, tokenizer) if isinstance(p, str) else list(p) for p in prompts]
    requests = [Request(ids, prompt_seed(seed, place)) for place, ids in enumerate(encoded)]
    generator = Generator(
        model, tokenizer, options, runtime, end_ids(model, tokenizer) if ends is None else list(ends),
        execution or RuntimeConfig(), Ranks.of(runtime, options, model), planned=planned,
    )  # fmt: skip
    training = model.training
    try:
        done = generator.ranks.gather(generator.run(requests))
    finally:
        model.train(training)
    return [done[place] for place in range(len(requests))]


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of a text that is to be continued, begin token included where the tokenizer has one. Raises InputError if empty."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    if not ids:
        raise InputError("an empty text has no token to continue; give a prompt of at least one character")
    return ids


def end_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """End tokens of the model's generation configuration (one or a list) and of the tokenizer."""
    said = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    said = said if isinstance(said, list) else [said]
    return list(dict.fromkeys(i for i in (*said, tokenizer.eos_token_id) if i is not None))
