from trainer.watch import Reserve


def test_before_anything_was_timed_only_saving_and_leaving_are_reserved():
    assert Reserve().seconds(save_s=10.0, evaluation_due=True) == 1.5 * 10 + 2


def test_the_slowest_of_the_recent_steps_counts_for_those_whose_numbers_are_late():
    reserve = Reserve()
    for seconds in (9.0, *[1.0] * 19):
        reserve.step_took(seconds)
    assert reserve.seconds(save_s=0.0, evaluation_due=False) == 4 * 9 + 2
    reserve.step_took(1.0)  # the slow one is long ago
    assert reserve.seconds(save_s=0.0, evaluation_due=False) == 4 + 2


def test_an_evaluation_counts_only_where_one_is_due():
    reserve = Reserve()
    reserve.evaluation_took(30.0)
    assert reserve.seconds(save_s=0.0, evaluation_due=False) == 2
    assert reserve.seconds(save_s=0.0, evaluation_due=True) == 32
    reserve.evaluation_took(5.0)
    assert reserve.seconds(save_s=0.0, evaluation_due=True) == 7
