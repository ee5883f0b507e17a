from benchmarks.reference.exit_codes import page


def test_each_code_stands_once_with_the_errors_of_tuner_and_trainer():
    text = page()
    numbers = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")][2:]
    assert numbers == ["0", "2", "3", "4", "5", "6", "7", "8", "9", "70", "75", "76", "130", "143"]
    assert "`autotune.errors.ProfileRefused`, `trainer.errors.ProfileRefused`" in text
