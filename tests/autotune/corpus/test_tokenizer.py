import json
import random
import subprocess
import sys
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordLevelTrainer

from autotune.corpus import tokenizer as module
from autotune.corpus.tokenizer import (
    SPECIAL_TOKENS,
    learn_bpe,
    learn_word_level,
    load_tokenizer,
    mixed_texts,
)
from autotune.errors import BadInput
from trainer.formats.errors import BadConfig

TEXTS = ["push rbp [NEXT] ret [NEXT]", "pop rbp [NEXT] pop rbx [NEXT]"]
ROBERTA = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "ret": 4, "<mask>": 9}


def learn(vocab_size=64, texts=TEXTS):
    counts = Counter(word for text in texts for word in text.split())
    return learn_word_level(
        sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])),
        vocab_size=vocab_size,
    )


def saved(path, vocab, change=lambda whole: None):
    """Save a tokenizer of a vocabulary, with its JSON changed."""
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    whole = json.loads(tokenizer.to_str())
    change(whole)
    path.write_text(json.dumps(whole))
    return path


def test_special_tokens_come_first():
    tokenizer = learn(vocab_size=7)
    assert tokenizer.used_vocab_size == 7
    assert [tokenizer.encoder.id_to_token(index) for index in range(6)] == [
        *SPECIAL_TOKENS,
        "[NEXT]",
    ]
    assert tokenizer.special_ids.all() == (0, 1, 2, 3, 4)


def test_rare_words_are_unknown():
    tokenizer = learn(vocab_size=7)
    # pop and rbp occur twice; the alphabet decides for pop.
    assert [ids.tolist() for ids in tokenizer.encode(["[NEXT] ret pop never"])] == [
        [5, 1, 6, 1]
    ]


def test_vocabulary_is_a_multiple_of_64():
    # Filled up to a multiple of 64 with words that are not used.
    assert (
        (learn().used_vocab_size, learn().vocab_size)
        == (11, learn().encoder.get_vocab_size())
        == (11, 64)
    )
    assert learn().encoder.id_to_token(11) == "[unused0]"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("abc[] ", max_size=20), max_size=10), st.integers(5, 20))
def test_learns_what_the_library_learns(texts, vocab_size):
    theirs = Tokenizer(WordLevel(unk_token="[UNK]"))
    theirs.pre_tokenizer = WhitespaceSplit()
    trainer = WordLevelTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    theirs.train_from_iterator(texts, trainer=trainer)
    ours = learn(vocab_size=vocab_size, texts=texts)
    vocabulary = {
        word: number
        for word, number in ours.encoder.get_vocab().items()
        if number < ours.used_vocab_size
    }
    assert vocabulary == theirs.get_vocab()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.text(
            st.sampled_from("ab [\t\n\x0b\x1c\x1d\x85\u2003\u00e9]MASKUN"), max_size=30
        ),
        max_size=8,
    )
)
def test_finds_words_like_the_library(texts):
    tokenizer = learn(texts=["a ab b [MASKED é", "K"])
    expected = [
        encoding.ids
        for encoding in tokenizer.encoder.encode_batch_fast(
            texts, add_special_tokens=False
        )
    ]
    assert tokenizer.words is not None
    for ours, theirs in zip(tokenizer.encode(texts), expected, strict=True):
        # A special token that is spelt out is a word like any other, and no word of
        # this vocabulary.
        assert ours.tolist() == [1 if number < 5 else number for number in theirs]


@pytest.mark.parametrize("learned", [learn, learn_bpe])
def test_spelt_out_special_token_stays_text(learned):
    texts = ["[MASK] a [SEP]b x[CLS]y [PAD]"]
    (ids,) = learned(texts=texts, vocab_size=320).encode(texts)
    assert not set(ids.tolist()) & {0, 2, 3, 4}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=6))
def test_byte_pairs_restore_every_text(texts):
    tokenizer = learn_bpe(TEXTS, vocab_size=320)
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert 1 not in ids
        assert tokenizer.encoder.decode(ids.tolist()) == text


def test_learning_byte_pairs_is_deterministic():
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{number}" for number in rng.zipf(1.3, 40)) for _ in range(300)]
    tokenizer, *repetitions = (learn_bpe(texts, vocab_size=640) for _ in range(3))
    assert {repetition.content for repetition in repetitions} == {tokenizer.content}
    assert tokenizer.vocab_size == 640


def test_few_texts_give_smaller_vocabulary():
    few = learn_bpe(["ab"], vocab_size=640)
    assert few.vocab_size % 64 == 0
    assert few.used_vocab_size <= few.vocab_size < 640


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(128, "uint16"), (2**16, "uint16"), (2**16 + 64, "uint32")],
)
def test_ids_use_the_smallest_type(vocab_size, dtype):
    tokenizer = learn(
        vocab_size=vocab_size,
        texts=[" ".join(f"w{number}" for number in range(2**16 + 64))],
    )
    assert (tokenizer.used_vocab_size, tokenizer.vocab_size, tokenizer.dtype) == (
        vocab_size,
        vocab_size,
        dtype,
    )


def test_given_tokenizer_is_used_unchanged(tmp_path):
    wrap = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    added = {
        "post_processor": json.loads(wrap.__getstate__()),
        "truncation": {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        },
    }
    path = saved(
        tmp_path / "tokenizer.json", ROBERTA, lambda whole: whole.update(added)
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.content == path.read_bytes()
    assert tokenizer.special_ids.model_dump() == {
        "cls": 0,
        "pad": 1,
        "sep": 2,
        "unk": 3,
        "mask": 9,
    }
    # Ids have a hole, and the model's table must reach the largest.
    assert (tokenizer.used_vocab_size, tokenizer.vocab_size) == (10, 64)
    (ids,) = tokenizer.encode(["ret ret ret ret other"])
    assert list(ids) == [4, 4, 4, 4, 3]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        *(
            (content, BadInput, "not a tokenizer")
            for content in (b"{}", b"[]", b"1", b'{"version": "1.0"}')
        ),
        (b'{"model": {"type": "WordLevel"}}', BadInput, "not a tokenizer"),
        (Tokenizer(BPE()).to_str().encode(), BadInput, "no pad token"),
        *(
            (content, BadConfig, None)
            for content in (b"not json", b"\xff\xfe", b"[" * 1000 + b"]" * 1000, None)
        ),
    ],
)
def test_rejects_invalid_tokenizer(content, error, message, tmp_path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(error, match=message):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (lambda whole, role=role: whole["model"]["vocab"].pop(role), role)
            for role in ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
        ),
        # Shows only in use.
        (lambda whole: whole["model"].update(unk_token="<other>"), "not a tokenizer"),
        # An id that no manifest can hold.
        (lambda whole: whole["model"]["vocab"].update(far=2**32 - 1), "4294967295"),
    ],
)
def test_tokenizer_fault_is_found_first(tmp_path, change, message):
    with pytest.raises(BadInput, match=message):
        load_tokenizer(saved(tmp_path / "tokenizer.json", ROBERTA, change))


@pytest.mark.parametrize("separator", [" ", ""])
def test_long_text_is_encoded_in_parts(monkeypatch, separator):
    tokenizer = learn_bpe(TEXTS, vocab_size=320)
    text = separator.join(TEXTS * 20)
    (whole,) = tokenizer.encode([text])
    sizes: list[int] = []
    encoded = module.DatasetTokenizer._encode_batch

    def recording(self, parts):
        sizes.extend(map(len, parts))
        return encoded(self, parts)

    monkeypatch.setattr(module, "_STRETCH_CHARACTERS", 200)
    monkeypatch.setattr(module, "_NEAR_CHARACTERS", 50)
    monkeypatch.setattr(module.DatasetTokenizer, "_encode_batch", recording)
    (in_parts,) = tokenizer.encode([text])
    assert max(sizes) <= 200 < len(text)
    assert tokenizer.encoder.decode(in_parts.tolist()) == text
    # Cuts before whitespace cost nothing, as tokens never reach across it.
    assert (
        in_parts.tolist() == whole.tolist()
        if separator
        else len(in_parts) <= len(whole) + len(sizes)
    )


@given(st.lists(st.text(), max_size=20))
def test_sampled_texts_have_a_fixed_order(texts):
    lines = "".join(
        json.dumps(text, ensure_ascii=False) + "\n" for text in texts
    ).encode()
    assert sorted(mixed_texts(lines)) == sorted(texts)
    assert list(mixed_texts(lines)) == list(mixed_texts(lines))


def test_sampled_texts_are_mixed():
    lines = "".join(f'"{number}"\n' for number in range(1000)).encode()
    first_half = [int(text) for text in islice(mixed_texts(lines), 500)]
    assert 200 < sum(number < 500 for number in first_half) < 300


def test_learns_only_from_what_memory_allows():
    assert module.learnable_texts(["the same words in every line"] * 1000, 200) == 1000
    assert module.learnable_texts(["A" * 5000, "B"], 2000) == 1
    assert [
        module.merges_for(*sizes)
        for sizes in ((1000, 10_000), (2**23, 2**26), (2**16, 2**31))
    ] == [1, 4, 8]


@pytest.mark.parametrize("character", ["A", "\u00c4"])
def test_bounds_texts_of_endless_words(character):
    letters = random.Random(0)
    proteins = [
        "".join(letters.choices(f"{character}CDEFGHIKLMNPQRSTVWY", k=100))
        for _ in range(100)
    ]
    count = module.learnable_texts(proteins, 2000)
    sizes = [len(text.encode()) for text in proteins]
    assert sum(sizes[:count]) <= 2000 < sum(sizes[: count + 1])


_LEARN_FROM_PROTEINS = """
import json, random
from itertools import islice
from autotune.corpus.tokenizer import (
    _DISTINCT_BYTES, learn_bpe, learnable_texts, mixed_texts
)

letters = random.Random(0)
proteins = (
    "".join(letters.choices("ACDEFGHIKLMNPQRSTVWY", k=300)) for _ in range(30_000)
)
lines = "".join(json.dumps(protein) + "\\n" for protein in proteins).encode()
count = learnable_texts(mixed_texts(lines), _DISTINCT_BYTES)
learn_bpe(islice(mixed_texts(lines), count), vocab_size=1024)
# Not getrusage's peak, which a process inherits from its parent.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([count, int(status["VmHWM"].split()[0])]))
"""


@pytest.mark.slow
def test_byte_pairs_of_proteins_fit_in_memory():
    process = subprocess.run(
        [sys.executable, "-c", _LEARN_FROM_PROTEINS], capture_output=True, check=True
    )
    count, peak_kib = json.loads(process.stdout)
    assert count < 30_000
    assert peak_kib < 700 * 2**10  # of 1 GiB, with what a worker holds besides
