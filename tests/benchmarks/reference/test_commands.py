import typer

from benchmarks.reference.commands import page


def test_every_command_that_help_shows_has_a_section_and_hidden_ones_have_none():
    text = page()
    assert "\n## autotune data prepare\n" in text
    assert "\n## The trainer\n" in text
    assert "launch meet" not in text


def test_an_option_has_its_kind_bounds_unit_default_and_help():
    text = page()
    assert "| `--seq-length` | integer ≥ 8 | tokens | `512` | Tokens in a row. |" in text
    assert "| `--trial-timeout` | number ≥ 1 | s | `600.0` | Seconds that one trial may take. |" in text
    assert "| `--head` | `dense`, `masked` |  | `masked` |" in text
    assert "| `--accumulate` or `--no-accumulate` | flag |  | on |" in text
    assert "Else the environment's `AUTOTUNE_DATA`." in text


def test_options_of_the_trainer_are_there_too():
    assert "| `--set train.KEY=VALUE` | text; several |" in page()


def test_a_hidden_option_is_left_out(monkeypatch):
    app = typer.Typer()

    @app.command("a")
    def a(shown: int = 1, secret: str = typer.Option("x", hidden=True)) -> None:
        """Do a."""

    @app.command("b", hidden=True)
    def b() -> None:
        """Do b."""

    @app.command("c")
    def c() -> None:
        """Do c. And more."""

    monkeypatch.setattr("benchmarks.reference.commands.app", app)
    text = page()
    assert "| `--shown` | integer |  | `1` |" in text
    assert "secret" not in text
    assert "Do b." not in text
    assert "| Do c. |" in text
    assert "No options." in text
