"""Completions against transformers' generate, and against known texts of the real small model."""

import copy
import itertools
import json
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as StockLlama

from modeling.execution import Execution, bind
from modeling.liveness import allocator_peak
from modeling.llama import LlamaForCausalLM
from recipes.pipeline import engine
from recipes.pipeline.config import GenerateConfig, RuntimeConfig
from recipes.pipeline.decoder import Decoder, Shape, Step
from recipes.pipeline.generation import Generator, Request, end_ids, generate_texts
from recipes.pipeline.model import build_model, load_tokenizer
from recipes.pipeline.runtime import Runtime
from recipes.pipeline.texts import Writer
from recipes.pipeline.tokenizer import bytes_tokenizer

REPOSITORY = Path(__file__).resolve().parents[3]
CPU = Runtime("cpu", lazy=False)
PROMPTS = [[5, 9, 12, 7], [3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [60, 61], [8, 8, 8, 8, 8, 8]]


@pytest.fixture(scope="module")
def tiny():
    """(stock, ours, tokenizer): equal weights large enough that texts vary; 300 tokens, 257 ends, 258 pads."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=256, eos_token_id=257, pad_token_id=258,
    )  # fmt: skip
    stock = StockLlama(config).eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    ours = LlamaForCausalLM(config).eval()
    ours.load_state_dict(stock.state_dict())
    return stock, ours, bytes_tokenizer()


def expected(stock, prompt, tokens, ends=None, **options):
    ids = torch.tensor([prompt])
    out = stock.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=258,
        eos_token_id=ends, **options,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def ids_of(completions):
    return [completion.ids for completion in completions]


WAYS = {
    "joined": ({}, {}),
    "modules": ({"fused": False}, {}),
    "one by one": ({"batch_size": 1}, {}),
    "a length of 64": ({"length_bucket": 64}, {}),
    "chunks of 3": ({"prefill_chunk": 3}, {}),
    "looks every 5": ({"stop_check": 5}, {}),
    "no compaction": ({"compact": False}, {}),
    "compiled": ({"prefill_chunk": 4, "length_bucket": 8}, {"compile": True, "compile_backend": "eager"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_greedy_ids_are_transformers_own_however_it_is_executed(tiny, way):
    stock, ours, tokenizer = tiny
    options, execution = WAYS[way]
    # an end token that ends two of the five early
    ends = [expected(stock, PROMPTS[0], 12)[3], 257]
    wanted = [expected(stock, prompt, 12, ends=ends) for prompt in PROMPTS]
    assert len({len(ids) for ids in wanted}) > 1
    torch._dynamo.reset()
    settings = GenerateConfig(**{"max_new_tokens": 12, "batch_size": 5, **options})
    found = generate_texts(ours, tokenizer, PROMPTS, settings, CPU, ends, RuntimeConfig(**execution))
    assert ids_of(found) == wanted
    for completion, prompt in zip(found, PROMPTS, strict=True):
        assert completion.finish_reason == ("eos" if completion.ids[-1] in ends else "length")
        assert (completion.prompt_tokens, completion.new_tokens) == (len(prompt), len(completion.ids))


@pytest.mark.parametrize("in_place", [None, False])
def test_in_place_changes_no_id(tiny, in_place):
    stock, ours, tokenizer = tiny
    bind(ours, Execution(in_place_residual=in_place))
    found = generate_texts(ours, tokenizer, PROMPTS, GenerateConfig(max_new_tokens=12, fused=False), CPU, [257])
    bind(ours, Execution())
    assert ids_of(found) == [expected(stock, prompt, 12, ends=[257]) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_known_texts_of_the_real_small_model(smol, rows):
    _, ours, tokenizer = smol
    options = GenerateConfig(max_new_tokens=8, batch_size=rows)
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Once upon a time", "The sky is")]
    found = generate_texts(ours, tokenizer, prompts, options, CPU)
    assert [one.text for one in found] == [", the city of Nova Haven was a", " a canvas of colors, a canvas of"]


def test_longer_texts_begin_with_the_shorter_ones(tiny):
    _, ours, tokenizer = tiny
    for temperature in (0.0, 1.0):
        texts = []
        for tokens in (20, 30, 40):
            options = GenerateConfig(max_new_tokens=tokens, temperature=temperature, ignore_eos=True)
            texts.append(ids_of(generate_texts(ours, tokenizer, PROMPTS, options, CPU)))
        for short, long in itertools.pairwise(texts):
            assert [ids[: len(some)] for ids, some in zip(long, short, strict=True)] == short


def test_thirty_two_tokens_with_and_without_a_cache(tiny):
    stock, ours, tokenizer = tiny
    found = generate_texts(ours, tokenizer, PROMPTS[:1], GenerateConfig(max_new_tokens=32, ignore_eos=True), CPU)
    assert found[0].ids == expected(stock, PROMPTS[0], 32, use_cache=False)


def test_a_second_shorter_request_starts_afresh(tiny):
    stock, ours, tokenizer = tiny
    generator = Generator(ours, tokenizer, GenerateConfig(max_new_tokens=8, ignore_eos=True), CPU, [])
    first = generator.run([Request(PROMPTS[2], 0)])
    cache = generator.decoder.cache
    second = generator.run([Request(PROMPTS[1], 0)])
    assert generator.decoder.cache is cache  # the memory is used again
    assert (first[0].ids, second[0].ids) == (expected(stock, PROMPTS[2], 8), expected(stock, PROMPTS[1], 8))


def test_ended_rows_are_padding_for_the_model_and_cost_nothing_after_compaction(tiny, monkeypatch):
    stock, ours, tokenizer = tiny
    plain = [expected(stock, prompt, 12) for prompt in PROMPTS[:2]]
    end = plain[0][1]
    assert end not in plain[1]
    fed = []
    original = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, tokens: fed.append(tokens.tolist()) or original(self, tokens))
    for compact in (False, True):
        fed.clear()
        options = GenerateConfig(max_new_tokens=12, batch_size=2, compact=compact)
        found = generate_texts(ours, tokenizer, PROMPTS[:2], options, CPU, [end])
        assert ids_of(found) == [plain[0][:2], plain[1]]
        later = fed[2:]
        assert len(later) == 9
        if compact:
            assert [len(row) for row in later] == [1] * 9
        else:
            rows = [next(n for n in (0, 1) if row[n] == 258) for row in later]
            assert len(set(rows)) == 1


def test_any_of_several_end_tokens_stops(tiny):
    stock, ours, tokenizer = tiny
    plain = expected(stock, PROMPTS[0], 12)
    for place in (2, 5):
        assert plain.index(plain[place]) == place
        ours.generation_config.eos_token_id = [299, plain[place]]
        assert plain[place] in end_ids(ours, tokenizer)
        found = generate_texts(ours, tokenizer, PROMPTS[:1], GenerateConfig(max_new_tokens=12), CPU)[0]
        assert (found.ids, found.finish_reason) == (plain[: place + 1], "eos")
    ours.generation_config.eos_token_id = 257


@pytest.fixture(scope="module")
def lettered(tiny):
    """The tiny model, restricted to the letters a to z: its texts are text."""
    model = copy.deepcopy(tiny[1])
    with torch.no_grad():
        model.lm_head.weight[: ord("a")] = model.lm_head.weight[ord("z") + 1 :] = 0
    return model


@pytest.mark.parametrize("every", [1, 4, 12])
def test_a_stop_text_ends_a_row_whenever_it_is_looked_for(lettered, tiny, every):
    tokenizer = tiny[2]
    options = {"max_new_tokens": 12, "ignore_eos": True, "stop_check": every}
    whole = generate_texts(lettered, tokenizer, PROMPTS[:3], GenerateConfig(**options), CPU)
    assert all(completion.text.isalpha() and len(completion.text) == 12 for completion in whole)
    stop = whole[0].text[5:7]
    place = whole[0].text.find(stop)
    found = generate_texts(lettered, tokenizer, PROMPTS[:3], GenerateConfig(stop=["??", stop], **options), CPU)
    assert found[0].text == whole[0].text[:place] and found[0].finish_reason == "stop"
    assert found[0].ids == whole[0].ids[: place + 2] and found[0].new_tokens == place + 2
    for one, other in zip(found[1:], whole[1:], strict=True):
        assert stop in other.text or one == other


def test_text_is_told_as_it_comes_without_what_may_still_change(lettered, tiny):
    told = []
    options = GenerateConfig(max_new_tokens=12, ignore_eos=True, stop=["??"], stop_check=1)
    generator = Generator(lettered, tiny[2], options, CPU, [], on_text=lambda *news: told.append(news))
    text = generator.run([Request(PROMPTS[0], 0)])[0].text
    assert len(told) == 12 and [ended for *_, ended in told] == [False] * 11 + [True]
    assert told[0][1] == "" and told[1][1] == text[0]  # a letter behind, for a stop text of two
    assert "".join(news for _, news, _ in told) == text
    writer = Writer(tiny[2], [65], [], GenerateConfig())
    parts = []
    for byte in "né€".encode():
        writer.add([byte])
        parts.append(writer.news())
    assert parts == ["n", "", "é", "", "", "€"]


def test_a_drawn_text_depends_on_prompt_and_place_only(tiny):
    _, ours, tokenizer = tiny
    sampling = {"max_new_tokens": 10, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
    texts = [
        ids_of(generate_texts(ours, tokenizer, PROMPTS, GenerateConfig(batch_size=rows, **sampling), CPU, [257]))
        for rows in (1, 2, 5)
    ]
    assert texts[0] == texts[1] == texts[2]
    other = generate_texts(ours, tokenizer, PROMPTS, GenerateConfig(**sampling), CPU, [257], seed=1)
    assert ids_of(other) != texts[0]
    twins = generate_texts(ours, tokenizer, [PROMPTS[0]] * 2, GenerateConfig(**sampling), CPU, [257])
    assert twins[0].ids != twins[1].ids


class _Scored(TorchDispatchMode):
    """The number of scores that products with one table, the head's weight, put out."""

    def __init__(self, table):
        super().__init__()
        self.place, self.scores = table.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        read = [a.untyped_storage().data_ptr() for a in arguments if isinstance(a, torch.Tensor)]
        if self.place in read and function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "linear"):
            self.scores += result.numel()
        return result


def test_a_long_prefill_computes_scores_of_its_last_position_only():
    config = LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(4)
    wide = LlamaForCausalLM(config).eval()
    prompts = [[n * 37 % 49152 for n in range(1000)], [n * 41 % 49152 for n in range(900)]]
    for rows in (prompts[:1], prompts):
        scores = []
        for fused, chunk in ((True, 0), (False, 0), (False, 400)):
            options = GenerateConfig(max_new_tokens=4, fused=fused, prefill_chunk=chunk)
            decoder = Decoder(wide, CPU, options, RuntimeConfig(), Shape(len(rows), 1004, padded=len(rows) > 1))
            with torch.no_grad(), _Scored(wide.lm_head.weight) as counted:
                scores.append(decoder.prefill(rows, 1000, 258))
            assert counted.scores == len(rows) * 49152, (fused, chunk)
        assert all(tuple(score.shape) == (len(rows), 49152) for score in scores)
        torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scores[1], scores[2], rtol=1e-4, atol=1e-4)


def test_embeddings_instead_of_ids_give_the_same_eight_tokens(tiny):
    _, ours, _ = tiny
    ids = torch.tensor([PROMPTS[2]])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 258}
    by_ids = ours.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :]
    embedded = ours.get_input_embeddings()(ids).detach()
    by_embeddings = ours.generate(inputs_embeds=embedded, attention_mask=torch.ones_like(ids), **options)
    assert by_ids.shape == by_embeddings.shape == (1, 8) and torch.equal(by_ids, by_embeddings)


def test_memory_that_runs_out_halves_the_batch(tiny, monkeypatch, capsys):
    stock, ours, tokenizer = tiny
    original = Decoder.prefill

    def narrow(self, prompts, width, pad):
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return original(self, prompts, width, pad)

    monkeypatch.setattr(Decoder, "prefill", narrow)
    found = generate_texts(
        ours, tokenizer, PROMPTS, GenerateConfig(max_new_tokens=6, batch_size="auto", ignore_eos=True), CPU,
        planned=lambda longest: 5,
    )  # fmt: skip
    assert ids_of(found) == [expected(stock, prompt, 6) for prompt in PROMPTS]
    assert "2 row(s) a batch" in capsys.readouterr().err
    with pytest.raises(torch.OutOfMemoryError):  # a batch size that was said is kept
        generate_texts(ours, tokenizer, PROMPTS, GenerateConfig(max_new_tokens=6, batch_size=5), CPU)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_rows_that_are_planned_are_those_that_fit(compose, monkeypatch, attention):
    """The allocator's own peak, cache included, stays within what was said to be free, and one row more does not."""
    from recipes.pipeline import room

    options = [f"runtime.attention={attention}", "generate.max_new_tokens=8", "generate.batch_size=auto"]
    cfg = compose("+experiment=tiny", "runtime=cpu", "generate.prompt=[x]", *options, root="generate")
    tokenizer = bytes_tokenizer()
    model = build_model(cfg, tokenizer, CPU)
    free = 40 * 2**20
    monkeypatch.setattr(room, "free_bytes", lambda kind: free / room.SHARE)
    rows = engine.generator(cfg, model, tokenizer, CPU).rows(200)

    def peak(count):
        own = copy.deepcopy(cfg)
        own.generate.batch_size = count
        generator = engine.generator(own, model, tokenizer, CPU)
        # Of unlike lengths: a batch that is padded
        return allocator_peak(lambda: generator.run([Request([5] * (200 - n % 2), n) for n in range(count)]))

    assert 5 < rows < 500 and peak(rows) <= free < peak(rows + max(1, rows // 20))


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "bias": "all"},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["v_proj", "lm_head"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
    ],
    ids=str,
)
def test_every_kind_of_adapter_generates_what_peft_does(tiny, compose, tmp_path, kind):
    stock, _, tokenizer = tiny
    stock.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    chosen = {"target_modules": ["q_proj", "v_proj", "down_proj"], **kind}
    adapted = get_peft_model(copy.deepcopy(stock), LoraConfig(r=4, task_type="CAUSAL_LM", **chosen)).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the vocabulary's tables are saved too
        adapted.save_pretrained(tmp_path / "adapter")
    given = [
        f"model.name_or_path={tmp_path / 'base'}",
        f"adapter.path={tmp_path / 'adapter'}",
        "generate.ignore_eos=true",
    ]
    cfg = compose(*given, "runtime=cpu", "generate.prompt=[x]", "generate.max_new_tokens=9", root="generate")
    model = engine.distribute(cfg, build_model(cfg, load_tokenizer(cfg.model), CPU), CPU)
    done = engine.generator(cfg, model, tokenizer, CPU).run([Request(prompt, 0) for prompt in PROMPTS])
    found = [done[place].ids for place in range(len(PROMPTS))]
    assert found == [expected(adapted, prompt, 9) for prompt in PROMPTS]
    assert found != [expected(stock, prompt, 9) for prompt in PROMPTS]


def test_the_model_is_given_back_as_it_came(tiny):
    _, ours, tokenizer = tiny
    ours.train()
    generate_texts(ours, tokenizer, PROMPTS[:1], GenerateConfig(max_new_tokens=2), CPU)
    assert ours.training
    ours.eval()


def test_hpu_graphs_are_captured_from_a_step_of_tensors(tiny):
    import inspect

    names = list(inspect.signature(Step.forward).parameters)[1:]
    kinds = inspect.get_annotations(Step.forward)
    assert names and all(kinds[name] in ("Tensor", "Tensor | None") for name in names)


LAZY = """
import json, sys
import torch
from recipes.pipeline.runtime import Runtime, start_lazy_engine
start_lazy_engine()
import torch._lazy.metrics as metrics
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as StockLlama
from modeling.execution import Execution, bind, mark_step_for
from modeling.llama import LlamaForCausalLM
from recipes.pipeline.config import GenerateConfig
from recipes.pipeline.generation import Generator, Request
from recipes.pipeline.tokenizer import bytes_tokenizer
torch.manual_seed(4)
config = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=128, eos_token_id=257, pad_token_id=258)
stock = StockLlama(config).eval()
model = LlamaForCausalLM(config).eval()
model.load_state_dict(stock.state_dict())
model.to("lazy")
bind(model, Execution(mark_step=mark_step_for("lazy", lazy=True), attention="eager"))
LENGTHS = [[3, 9, 16], [12, 2], [16, 16, 16], [5], [1, 14, 11]]
SAMPLING = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}
result = []
for batch in LENGTHS + LENGTHS:
    if len(result) % len(LENGTHS) == 0:
        sampling = SAMPLING if result else {}
        options = GenerateConfig(max_new_tokens=9, length_bucket=16, batch_size=3, **sampling)
        generator = Generator(model, bytes_tokenizer(), options, Runtime("lazy", lazy=True), [257])
    prompts = [torch.randint(0, 250, (n,)).tolist() for n in batch]
    metrics.reset()
    done = generator.run([Request(p, n) for n, p in enumerate(prompts)])
    compiled = metrics.counter_value("UncachedCompile") or 0
    wanted = []
    for p in prompts:
        ids = torch.tensor([p])
        out = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=258)
        wanted.append(out[0, len(p):].tolist())
    result.append([compiled, [done[n].ids for n in range(len(prompts))] == wanted])
print(json.dumps(result))
"""


@pytest.mark.slow
def test_lazy_graphs_are_compiled_in_the_first_batch_only(warm_python):
    done = subprocess.run([warm_python, "-c", LAZY], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    batches = json.loads(done.stdout.splitlines()[-1])
    greedy, drawn = batches[:5], batches[5:]
    assert greedy[0][0] > 0 and drawn[0][0] > 0
    assert [compiled for compiled, _ in greedy[1:] + drawn[1:]] == [0] * 8
    assert all(equal for _, equal in greedy)
