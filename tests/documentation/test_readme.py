"""The commands of the README are typed in order, and do what they say."""

import pytest

from tests.documentation.typed import typed, write_model

pytestmark = [pytest.mark.slow, pytest.mark.system]


def test_the_readme_does_what_it_says(tmp_path):
    write_model(tmp_path / "tiny")
    typed("README.md", tmp_path)
    assert (tmp_path / "demo" / "reports" / "report.html").is_file()
