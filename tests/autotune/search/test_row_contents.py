from autotune.search.row_contents import assumed_contents, contents_of
from trainer.dataset import read_manifest


def test_without_a_dataset_packed_rows_are_nearly_full_and_others_hold_a_sample():
    packed, padded = (assumed_contents(500, layout, 512) for layout in ("packed", "padded"))
    assert packed.assumed
    assert packed.dataset_hash is None
    assert (packed.mean_real_tokens, packed.documents) == (0.997 * 512, 4.0)
    assert (padded.mean_real_tokens, padded.documents) == (512, 1.0)
    assert (packed.vocab_size, packed.mean_samples) == (500, 1.0)


def test_a_dataset_is_laid_out_and_named(patterned_dataset):
    found = contents_of(patterned_dataset, "packed", 64)
    manifest = read_manifest(patterned_dataset)
    assert not found.assumed
    assert (found.dataset_hash, found.vocab_size) == (manifest.dataset_hash, manifest.vocab_size)
    assert 32 < found.mean_real_tokens <= 64
    assert found.documents >= found.mean_samples > 1
