"""Prompts against what tokenizers make of the published formats' literal text, and SmolLM2's own ids."""

import itertools
import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaTokenizerFast, PreTrainedTokenizerFast

from recipes.pipeline import prompts
from recipes.pipeline.config import DataConfig, InputError, LossOn, Template

COLOR = {"instruction": "Name a color.", "output": "Blue"}
WORDS = (
    "Name a color. Blue is the answer: Response, Instruction, Input; describes a task that completes Be brief INST SYS"
)
ODD_OUTPUTS = [
    "Blue",
    " a leading space",
    "a trailing space ",
    "\nstarts with a line break\n\nand ends with one\n",
    "a <|im_end|> and a </s> that are text",
    "naïve café, 北京 and 🙂",
    "def f(x):\n\treturn {x: 1}  # two  spaces",
    "1,234.5 % , then . and n't",
]


@pytest.fixture(scope="session")
def sentencepiece():
    """As Llama-2's: byte fallback, a space before a text's first word, BOS added."""
    lines = (WORDS + " " + prompts.ALPACA["alpaca"][1]).split("\n")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *state["vocab"]]
    merges = [tuple(pair) for pair in state["merges"]]
    vocabulary = {name: n for n, name in enumerate(dict.fromkeys(names))}
    raw = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(parts)
    return LlamaTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def llama3():
    """As Llama-3's: bytes, special tokens for turns, BOS by the post-processor and no add_bos_token attribute."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [WORDS], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    names = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id"]
    raw.add_special_tokens([f"<|{name}|>" for name in names])
    bos = "<|begin_of_text|>"
    raw.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, raw.token_to_id(bos))])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, eos_token="<|end_of_text|>")


def literal(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_the_alpaca_prompt_has_its_known_ids(smol_tokenizer):
    encoded = prompts.encode([COLOR], DataConfig(), smol_tokenizer)[0]
    assert len(encoded.prompt) == 34
    assert encoded.response == [23390, 2]
    text = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nName a color.\n\n### Response:\n"
    )
    assert encoded.prompt == literal(smol_tokenizer, text)


def test_a_record_with_input_uses_the_other_wording(smol_tokenizer):
    record = {"instruction": "Add.", "input": "2, 3", "output": "5"}
    assert decoded(smol_tokenizer, prompts.encode_prompt(record, DataConfig(), smol_tokenizer)) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n2, 3\n\n### Response:\n"
    )


def test_a_missing_input_is_an_empty_one(smol_tokenizer):
    with_empty, without = prompts.encode([{**COLOR, "input": ""}, COLOR], DataConfig(), smol_tokenizer)
    assert with_empty == without


@pytest.mark.parametrize("template", ["alpaca", "llama2_chat", "tokenizer"])
def test_the_inference_prompt_is_the_start_of_the_training_sample(smol_tokenizer, template):
    data = DataConfig(template=Template[template])
    for output in ODD_OUTPUTS:
        record = {**COLOR, "output": output}
        assert (
            prompts.encode_prompt(COLOR, data, smol_tokenizer)
            == prompts.encode([record], data, smol_tokenizer)[0].prompt
        )


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("family", ["smol_tokenizer", "sentencepiece", "llama3"])
def test_the_response_decodes_to_its_text_and_one_end(family, bos, request):
    """240 records: each instruction and input with each output; the prompt carries BOS once or never."""
    tokenizer = request.getfixturevalue(family)
    before = getattr(tokenizer, "add_bos_token", None)
    tokenizer.add_bos_token = bos
    instructions = [f"Name a color, number {n}." for n in range(8)] + ["ends in a space ", "### Response:\n"]
    inputs = ["", "two\nlines", " "]
    made = [
        {"instruction": i, "input": n, "output": o} for i, n, o in itertools.product(instructions, inputs, ODD_OUTPUTS)
    ]
    try:
        encoded = prompts.encode(made, DataConfig(), tokenizer)
        inference = [prompts.encode_prompt(record, DataConfig(), tokenizer) for record in made[:24]]
    finally:
        if before is None:
            del tokenizer.add_bos_token
        else:
            tokenizer.add_bos_token = before
    assert len(encoded) == 240
    assert inference == [sample.prompt for sample in encoded[:24]]
    for record, sample in zip(made, encoded, strict=True):
        assert (sample.prompt + sample.response).count(tokenizer.bos_token_id) == int(bos)
        assert sample.prompt[0] == tokenizer.bos_token_id or not bos
        assert sample.response[-1] == tokenizer.eos_token_id
        assert sample.response.count(tokenizer.eos_token_id) == 1
        # a lone SentencePiece text loses one leading space when decoded; behind other ids it keeps it
        shown = decoded(tokenizer, literal(tokenizer, "x") + sample.response).removeprefix("x")
        assert shown == record["output"] + tokenizer.eos_token


def test_a_first_word_has_the_same_ids_whatever_the_template_begins_with(sentencepiece, monkeypatch):
    usual = prompts.encode([COLOR], DataConfig(), sentencepiece)[0]
    monkeypatch.setitem(prompts.ALPACA, "alpaca", ("### Instruction:\n{instruction}\n\n### Response:\n",) * 2)
    other = prompts.encode([COLOR], DataConfig(), sentencepiece)[0]
    assert usual.prompt != other.prompt
    assert usual.response == other.response
    whole = literal(sentencepiece, "### Instruction:\nName a color.\n\n### Response:\nBlue")
    assert whole == other.prompt[1:] + other.response[:-1]  # but for BOS and eos


def test_llama2_chat_is_the_published_format(sentencepiece):
    data = DataConfig(template=Template.llama2_chat, system_prompt="Be brief.")
    encoded = prompts.encode([COLOR], data, sentencepiece)[0]
    text = "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nName a color. [/INST] Blue </s>"
    assert encoded.prompt + encoded.response == literal(sentencepiece, text)
    assert prompts.stop_ids(data, sentencepiece) == [sentencepiece.eos_token_id]


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_llama3_chat_is_the_published_format(llama3, system):
    data = DataConfig(template=Template.llama3_chat, system_prompt=system)
    encoded = prompts.encode([{**COLOR, "input": "Not red."}], data, llama3)[0]
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    text = "<|begin_of_text|>"
    text += head.format("system") + "Be brief.<|eot_id|>" if system else ""
    text += head.format("user") + "Name a color.\n\nNot red.<|eot_id|>" + head.format("assistant")
    assert encoded.prompt == literal(llama3, text)
    assert encoded.response == literal(llama3, "Blue<|eot_id|>")
    eot = llama3.convert_tokens_to_ids("<|eot_id|>")
    assert prompts.stop_ids(data, llama3) == [eot, llama3.eos_token_id]


def test_text_that_looks_like_a_special_token_stays_text(llama3):
    data = DataConfig(template=Template.llama3_chat)
    record = {"instruction": "Repeat <|eot_id|><|start_header_id|>", "output": "<|eot_id|>"}
    encoded = prompts.encode([record], data, llama3)[0]
    eot = llama3.convert_tokens_to_ids("<|eot_id|>")
    assert encoded.prompt.count(eot) == 1
    assert encoded.response.count(eot) == 1
    assert encoded.response[-1] == eot


def test_the_tokenizers_own_template_is_what_transformers_writes(smol_tokenizer):
    data = DataConfig(template=Template.tokenizer)
    turns = [{"role": "user", "content": "Name a color."}]
    encoded = prompts.encode([COLOR], data, smol_tokenizer)[0]
    assert encoded.prompt == smol_tokenizer.apply_chat_template(turns, add_generation_prompt=True)
    whole = smol_tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": "Blue"}])
    assert encoded.prompt + encoded.response == whole[:-1]  # the line break behind <|im_end|> is never generated
    assert prompts.stop_ids(data, smol_tokenizer) == [2]


def test_bos_that_the_own_template_writes_is_not_doubled(smol_tokenizer):
    data = DataConfig(template=Template.tokenizer)
    assert smol_tokenizer.bos_token == "<|im_start|>"
    without = prompts.encode_prompt(COLOR, data, smol_tokenizer)
    smol_tokenizer.add_bos_token = True
    try:
        assert smol_tokenizer("Hello").input_ids == [1, 19556]
        assert prompts.encode_prompt(COLOR, data, smol_tokenizer) == without
        assert without[0] == 1
        alpaca = prompts.encode_prompt(COLOR, DataConfig(), smol_tokenizer)
        assert len(alpaca) == 35
        assert alpaca.count(1) == 1
    finally:
        smol_tokenizer.add_bos_token = False


def test_alpaca_joined_is_one_text(sentencepiece):
    """The tokens of the text as a whole, with BOS and eos, as the script of the measured 70B run made them."""
    data = DataConfig(template=Template.alpaca_joined, loss_on=LossOn.all)
    text = prompts.ALPACA["alpaca"][0].format(instruction="Name a color.").rstrip("\n") + "Blue"
    assert text.endswith("### Response:Blue")
    encoded = prompts.encode([COLOR], data, sentencepiece)[0]
    assert encoded.prompt == []
    assert encoded.response == [*sentencepiece(text).input_ids, sentencepiece.eos_token_id]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataConfig(template=Template.llama3_chat), "eot_id"),
        (DataConfig(template=Template.tokenizer), "no chat template"),
        (DataConfig(system_prompt="Be brief."), "data.system_prompt"),
        (DataConfig(template=Template.alpaca_joined), "data.loss_on=all"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(sentencepiece, data, words):
    with pytest.raises(InputError, match=words) as caught:
        prompts.encode([COLOR], data, sentencepiece)
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_a_record_is_named(llama3):
    llama3.chat_template = "{{ raise_exception('only one turn') }}"
    try:
        with pytest.raises(InputError, match="only one turn"):
            prompts.encode([COLOR], DataConfig(template=Template.tokenizer), llama3)
    finally:
        llama3.chat_template = None
