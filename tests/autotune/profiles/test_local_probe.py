import pytest

from autotune.errors import ProfileRejected
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.store import read_profile
from tests.autotune.profiles.profile_files import edit


def test_rejects_micro_batch_not_verified_to_fit(workdir):
    path = workdir / "p.toml"
    edit(path, "micro_batch_size = 2", "micro_batch_size = 3")
    with pytest.raises(ProfileRejected, match="exceeds 2, the largest"):
        require_local_probe(read_profile(path))
