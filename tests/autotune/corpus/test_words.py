"""What tokenizers are learned from stays within bounds, whatever the words are."""

import json
import random
import subprocess
import sys
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.corpus.words import learnable_texts, merges_for, mixed_texts


@given(st.lists(st.text(), max_size=20))
def test_sampled_texts_are_all_there_once_in_the_same_order_every_time(texts):
    lines = "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts).encode()
    assert sorted(mixed_texts(lines)) == sorted(texts)
    assert list(mixed_texts(lines)) == list(mixed_texts(lines))


def test_sampled_texts_are_mixed():
    lines = "".join(f'"{number}"\n' for number in range(1000)).encode()
    first_half = [int(text) for text in islice(mixed_texts(lines), 500)]
    assert 200 < sum(number < 500 for number in first_half) < 300


def test_texts_of_few_words_are_all_learned_from_and_at_least_one_however_long():
    assert learnable_texts(["the same words in every line"] * 1000, 200) == 1000
    assert learnable_texts(["A" * 5000, "B"], 2000) == 1


@pytest.mark.parametrize("character", ["A", "\u00c4"])
def test_texts_of_endless_words_are_learned_from_up_to_the_bound(character):
    letters = random.Random(0)
    proteins = ["".join(letters.choices(f"{character}CDEFGHIKLMNPQRSTVWY", k=100)) for _ in range(100)]
    count = learnable_texts(proteins, 2000)
    sizes = [len(text.encode()) for text in proteins]
    assert sum(sizes[:count]) <= 2000 < sum(sizes[: count + 1])


def test_merges_are_as_many_as_words_and_their_bytes_need():
    assert merges_for(1000, 10_000) == 1
    assert merges_for(2**23, 2**26) == 4
    assert merges_for(2**16, 2**31) == 8


_LEARN_FROM_PROTEINS = """
import json, random
from itertools import islice
from autotune.corpus.tokenizer import learn_bpe
from autotune.corpus.words import _DISTINCT_BYTES, learnable_texts, mixed_texts

letters = random.Random(0)
lines = "".join(json.dumps("".join(letters.choices("ACDEFGHIKLMNPQRSTVWY", k=300))) + "\\n" for _ in range(30_000))
lines = lines.encode()
count = learnable_texts(mixed_texts(lines), _DISTINCT_BYTES)
learn_bpe(islice(mixed_texts(lines), count), vocab_size=1024)
# Not getrusage's peak, which a process inherits from whoever started it.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([count, int(status["VmHWM"].split()[0])]))
"""


@pytest.mark.slow
def test_byte_pairs_of_proteins_are_learned_in_a_workers_memory():
    done = subprocess.run([sys.executable, "-c", _LEARN_FROM_PROTEINS], capture_output=True, check=True)
    count, peak_kib = json.loads(done.stdout)
    assert count < 30_000
    assert peak_kib < 700 * 2**10  # of 1 GiB, with what a worker holds besides
